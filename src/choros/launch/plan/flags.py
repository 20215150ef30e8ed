"""How a field of ``Arguments`` is written on chorosrun's command line, and which values it may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Flag", "FlagValue", "Seconds", "WholeNumber", "flag", "flag_of"]

_KEY = "flag"


@dataclass(frozen=True)
class WholeNumber:
    """The whole numbers from ``least`` to ``most``."""

    least: int
    most: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True)
class Seconds:
    """Finite times, more than 0; with ``or_zero`` also 0."""

    or_zero: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return value > 0 or (self.or_zero and value == 0)

    def __str__(self) -> str:
        return f"a finite number of seconds, {'0 or more' if self.or_zero else 'more than 0'}"


class FlagValue(Enum):
    """What follows a flag on the command line, if that is not a number."""

    TEXT = "text"
    FILE = "a file"
    SWITCH = "nothing"
    REPEATED = "a text, once for each time that the flag is given"
    TWO = "two numbers"


@dataclass(frozen=True)
class Flag:
    """A flag of chorosrun.

    Attributes:
        group: the heading under which ``--help`` lists it.
        names: its spellings; a switch may have one for off, as ``--on/--off``.
        help: a sentence, or several.
        value: what follows it; numbers have ``bounds`` instead.
        bounds: the numbers that it accepts.
        metavar: the name of its value in the help.
    """

    group: str
    names: tuple[str, ...]
    help: str
    value: FlagValue = FlagValue.TEXT
    bounds: WholeNumber | Seconds | None = None
    metavar: str | None = None


def flag(group: str, *names: str, default: object = None, default_factory: Any = None, **rest: Any) -> Any:
    """Returns the field of a dataclass whose values a ``Flag`` sets; ``rest`` are the flag's attributes."""
    metadata = {_KEY: Flag(group, names, **rest)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_of(each: Field[Any]) -> Flag | None:
    """The flag of a field, if it has one."""
    metadata: Mapping[str, Flag] = each.metadata
    return metadata.get(_KEY)
