"""The rows of flags: how one is written on a command line, which values it may have, and what it sets.

``arguments.py`` has those of a job, the fields of ``Arguments``; ``settings.py`` those that only set a variable;
``horovod_flags.py`` the rest of horovodrun's.
click's options, the checks, the arguments of ``choros.run`` and the tables of the documentation are made from them.
A row is a named tuple, as that is made in a tenth of a dataclass's time.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

from choros.errors import ConfigError
from choros.settings import Variable

#: Horovod's levels of log messages.
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class Value(NamedTuple):
    """What follows a flag: in words, its type in Python, the least and the most of a number, the choices of a text."""

    words: str
    types: tuple[type, ...] = (str,)
    least: float = 0
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def __contains__(self, value: object) -> bool:
        if isinstance(value, str) and str in self.types:
            return not self.choices or value.upper() in self.choices
        if not isinstance(value, (int, float)) or (isinstance(value, bool) and bool not in self.types):
            return False
        return isinstance(value, self.types) and self.least <= value <= self.most

    def __str__(self) -> str:
        return self.words

    @property
    def is_number(self) -> bool:
        """Whether it is a number."""
        return int in self.types


SWITCH = Value("true or false", (bool,))
TEXT = Value("a text")
FILE = Value("a file")
LEVEL = Value(f"one of {', '.join(LEVELS)}", choices=LEVELS)
WHOLE = Value("a whole number, 0 or more", (int,))
NUMBER = Value("a number, 0 or more", (int, float))
SHARE = Value("a number from 0 to 1", (int, float), most=1)
SECONDS = Value("a finite number of seconds, more than 0", (int, float), math.nextafter(0.0, 1.0), sys.float_info.max)
SECONDS_OR_ZERO = Value("a finite number of seconds, 0 or more", (int, float), 0, sys.float_info.max)


def whole_numbers(least: int, most: int) -> Value:
    """The whole numbers from ``least`` to ``most``."""
    return Value(f"a whole number from {least} to {most}", (int,), least, most)


class Flag(NamedTuple):
    """A flag: help lists it under ``group``, if that is not empty; ``names`` after ``/`` switch it off.
    ``python`` describes the argument of ``choros.run``, where ``help`` does not; ``None``: there is none. ``horovod``:
    what differs from horovodrun's, ``None`` if that lacks it, as it does ``own_names``. ``keys``: in Horovod's
    configuration files.
    It sets ``variable`` to ``text`` of its value, to nothing if that is empty; or changes nothing: ``no_effect``.
    """

    group: str
    names: str
    help: str = ""
    value: Value = TEXT
    metavar: str | None = None
    nargs: int = 1
    multiple: bool = False
    own_names: str = ""
    horovod: str | None = None
    python: str | None = ""
    keys: tuple[str, ...] = ()
    variable: Variable | None = None
    text: Callable[[Any], str] = str
    no_effect: str = ""
    argument: str = ""
    default: Any = None

    @property
    def dest(self) -> str:
        """The name of its value; ``argument``, or that of the first spelling: ``--log-level`` is ``log_level``."""
        return self.argument or self.on[0].lstrip("-").replace("-", "_")

    @property
    def on(self) -> list[str]:
        """The spellings, without those that switch it off."""
        return self.names.partition("/")[0].split()

    @property
    def off(self) -> list[str]:
        """The spellings that switch it off."""
        return self.names.partition("/")[2].split()

    def spelled(self, value: object = None, *, in_python: bool = False) -> str:
        """Returns the flag as it was given with ``value``, for messages."""
        if in_python:
            return self.dest
        if self.dest == "num_proc":
            return "-np"
        return next(name for name in (self.off if value is False else self.on) if name.startswith("--"))

    def check(self, value: object, *, in_python: bool = False) -> None:
        """Raises a ``ConfigError`` if ``value`` is none for this flag."""
        if self.nargs == 1:
            if value not in self.value:
                raise self.invalid(value, f"expected {self.value}.", in_python=in_python)
        elif not (
            isinstance(value, Sequence)
            and len(value) == self.nargs
            and all(each in self.value for each in value)
            and value[0] <= value[1]
        ):
            expected = f"expected two numbers, the smaller one first, each {self.value}."
            raise self.invalid(value, expected, in_python=in_python)

    def invalid(self, value: object, expected: str, *, in_python: bool = False) -> ConfigError:
        """Returns the error of an invalid value."""
        spelled = self.spelled(value, in_python=in_python)
        return ConfigError(f"{spelled}={value!r}: {expected}" if in_python else f"{spelled} {value}: {expected}")


def on_or_off(value: bool) -> str:
    """The text of a switch's variable."""
    return "1" if value else "0"


def flag_of(variable: Variable, **rest: Any) -> Flag:
    """Returns the flag that sets ``variable``, whose row says what it does, and which values it has."""
    row: dict[str, Any] = {"group": variable.group, "names": variable.flag, "metavar": variable.metavar}
    default = f"{variable.name}, or {variable.default}" if variable.default else variable.name
    row["help"] = f"{variable.help[:1].upper()}{variable.help[1:]} Default: {default}."
    if variable.choices == ("0", "1"):
        row |= {"value": SWITCH, "text": on_or_off}
    elif variable.unit:
        row["value"] = WHOLE
    if variable.key:
        row |= {"keys": (variable.key,), "horovod": ""}
    return Flag(**{**row, "variable": variable, **rest})


def flag(group: str, names: str, *, default: Any = None, default_factory: Any = None, **rest: Any) -> Any:
    """Returns a field of a dataclass with a row; ``rest`` are its attributes."""
    rest |= {"group": group, "names": names, "default": default}
    metadata = {"flag": flag_of(**rest) if "variable" in rest else Flag(**rest)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def given_of(flags: Iterable[Flag], given: Mapping[str, Any]) -> list[tuple[Flag, Any]]:
    """Returns those of the flags that are given, with their values; of ``given``, by ``dest``, ``None`` is not."""
    return [(each, value) for each in flags if (value := given.get(each.dest)) is not None]


def variables_of(flags: Iterable[Flag], given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that the given flags set for the ranks."""
    wanted = {}
    for each, value in given_of(flags, given):
        if each.variable is not None and (text := each.text(value)):
            wanted[each.variable.name] = text
    return wanted
