"""Writes the table of the public names of a module of ``tf.distribute``, from the installed TensorFlow::

    cd tests/tf_distribute_names; python parse.py tf.distribute choros.distribute > distribute.toml

Entries under ``[absent]`` and ``[different]`` are written by hand, and kept by hand when a table is made again.
"""

from __future__ import annotations

import enum
import inspect
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf


def names_of(module: str) -> tuple[dict[str, str], list[str]]:
    """Returns the signatures of a module's functions, classes and methods, and its other names."""
    found: Any = tf
    for part in module.split(".")[1:]:
        found = getattr(found, part)
    signatures, values = {}, []
    for name, each in _names(found):
        if isinstance(each, (ModuleType, property)) or not callable(each) or _is_enum(each):
            values.append(name)
        else:
            signatures[name] = ", ".join(_parameters(each, found))
    return signatures, values


def _names(module: Any) -> Iterator[tuple[str, Any]]:
    for name in _public(module):
        each = getattr(module, name)
        yield name, each
        if isinstance(each, type):
            for member in _public(each):
                if not _is_inherited(each, member):
                    yield f"{name}.{member}", inspect.getattr_static(each, member)


def _public(holder: Any) -> list[str]:
    return [name for name in dir(holder) if not name.startswith("_")]


def _is_inherited(cls: type, member: str) -> bool:
    """Whether a member is a tuple's, or one of every strategy's."""
    strategy = tf.distribute.Strategy
    return hasattr(tuple, member) or (cls is not strategy and issubclass(cls, strategy) and hasattr(strategy, member))


def _is_enum(each: Any) -> bool:
    return isinstance(each, enum.Enum) or (isinstance(each, type) and issubclass(each, enum.Enum))


def _parameters(function: Any, module: Any) -> Iterator[str]:
    function = getattr(function, "__func__", function)
    for each in inspect.signature(function).parameters.values():
        if each.name in ("self", "cls"):
            continue
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = each.default
        text = repr(default)
        if isinstance(default, enum.Enum):
            text = next(f"{name}.{default.name}" for name in _public(module) if getattr(module, name) is type(default))
        yield f"{star}{each.name}" + ("" if default is each.empty else f"={text}")


def _print(module: str, face: str) -> None:
    signatures, values = names_of(module)
    print(f"# The public names of {module} in TensorFlow {tf.__version__}, by parse.py. Defaults are source text.")
    print(f'original = "{module}"\nface = "{face}"\n\n[signatures]')
    for name, text in signatures.items():
        print(f'"{name}" = "{text}"')
    print("\n[values]")
    for name in values:
        print(f'"{name}" = "any"')
    print("\n[absent]\n\n[different]")


def _check(table: Path) -> None:
    """Prints where a table is not that of the installed TensorFlow."""
    content = tomllib.loads(table.read_text())
    signatures, values = names_of(content["original"])
    if content["signatures"] != signatures or list(content["values"]) != values:
        print(f"{table.name} is not {content['original']} of TensorFlow {tf.__version__}: write it by parse.py.")


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        for argument in sys.argv[2:]:
            _check(Path(argument))
    else:
        _print(*sys.argv[1:])
