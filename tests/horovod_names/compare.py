"""Compares a face with tables of Horovod's public names: ``python compare.py TABLE…`` prints the differences.

Names, order and defaults of arguments must be Horovod's. A face may have more arguments at the end, which are optional,
and defaults where Horovod has none.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_Kind = inspect.Parameter
_POSITIONAL = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD, _Kind.VAR_POSITIONAL)


def differences(table: Path) -> Iterator[str]:
    """Yields what a face lacks, or has different, that is neither ``absent`` nor ``different`` for a reason."""
    content = tomllib.loads(table.read_text())
    face = importlib.import_module(content["face"])
    allowed = {**content.get("absent", {}), **content.get("different", {})}
    used = set()
    for name, expected in (*content["signatures"].items(), *content["values"].items()):
        owner = name.partition(".")[0]
        if owner in content.get("absent", {}) and name != owner:
            continue
        found = list(_compare(face, name, expected, content["values"]))
        if name in allowed:
            used.add(name)
            if not found:
                yield f"{name}: is the same, but listed as absent or different"
        else:
            yield from found
    yield from (f"{name}: listed as absent or different, but not a public name" for name in allowed.keys() - used)


def _compare(face: Any, name: str, expected: Any, values: dict[str, Any]) -> Iterator[str]:
    ours = face
    for part in name.split("."):
        if not hasattr(ours, part):
            yield f"{name}: missing"
            return
        ours = getattr(ours, part)
    if name in values:
        if expected != "any" and ours != expected:
            yield f"{name}: is {ours!r}, expected {expected}"
        return
    # Horovod's signature, with the face's own objects as defaults.
    namespace: dict[str, Any] = {**vars(face)}
    exec(f"def horovods({expected}): pass", namespace)
    theirs = list(inspect.signature(namespace["horovods"]).parameters.values())
    parameters = [each for each in inspect.signature(ours).parameters.values() if each.name != "self"]
    own = {each.name: each for each in parameters}
    positional = [each.name for each in parameters if each.kind in _POSITIONAL]
    for index, each in enumerate(theirs):
        if each.kind is each.VAR_KEYWORD:
            if not any(other.kind is each.VAR_KEYWORD for other in parameters):
                yield f"{name}: takes no **{each.name}"
        elif each.name not in own:
            yield f"{name}: has no argument {each.name!r}"
        elif positional[index : index + 1] != [each.name]:
            yield f"{name}: {each.name!r} is not argument {index}"
        elif each.default is not each.empty and not _equal(own[each.name].default, each.default):
            yield f"{name}: {each.name}={own[each.name].default!r}, expected {each.default!r}"
    for each in parameters[len(theirs) :]:
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            yield f"{name}: {each.name!r} is not optional"


def _equal(ours: Any, expected: Any) -> bool:
    return ours is expected or (type(ours) is type(expected) and ours == expected)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for difference in differences(path):
            print(f"{path.stem}: {difference}")
