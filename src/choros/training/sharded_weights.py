"""Weights in several files, and their index, a ``.weights.json``: it changes from one set of files to the next.

::

    model.weights.json ─► model_00000.weights.h5, model_00001.weights.h5        as Keras names them
      written again    ─► model_00000.1.weights.h5, model_00001.1.weights.h5    the index is replaced in one step;
      and again        ─► model_00000.2.weights.h5, model_00001.2.weights.h5    then the last files are removed

Keras opens ``model_00000.weights.h5`` whatever the index says, so a file of this name remains: a link to the first one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from choros.durable import flush, replace, workplace

__all__ = ["unfinished_shards"]

_SUFFIX = ".weights.h5"


@contextmanager
def unfinished_shards(path: str) -> Iterator[Path]:
    """A block that writes sharded weights under the name it gets; a reader finds the last ones or the new ones.

    Args:
        path: the index; Keras replaces a suffix other than ``.json``.
    """
    index = Path(os.path.realpath(path)).with_suffix(".json")
    parent = index.parent
    with workplace(parent) as directory:
        yield directory / Path(path).name
        new = json.loads((directory / index.name).read_text())
        last = _files_of(index)
        names = _names(_files_in(new), last)
        for name, shard in names.items():
            (directory / name).rename(directory / shard)
        (directory / index.name).write_text(json.dumps(_renamed(new, names), indent=4))
        flush(directory)
        for shard in names.values():
            replace(directory / shard, parent / shard)
        replace(directory / index.name, index)
        _link(directory, parent, names)
        for name in (last | _tagged(index)) - {*names.values(), *_first(names)}:
            (parent / name).unlink(missing_ok=True)


def _names(files: set[str], last: set[str]) -> dict[str, str]:
    """Returns Keras' name → the new one, of each file; none of these is in ``last``."""
    for tag in ("", ".1", ".2"):
        names = {name: name.removesuffix(_SUFFIX) + tag + _SUFFIX for name in files}
        if last.isdisjoint(names.values()) and (tag or not last):
            return names
    raise AssertionError("an index names the files of one write, so not those with both tags")


def _files_in(index: Any) -> set[str]:
    return {name for value in index["weight_map"].values() for name in ([value] if isinstance(value, str) else value)}


def _files_of(index: Path) -> set[str]:
    """Returns the files of the last complete write; none if there is none, or the index is another program's."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return {name for name in _files_in(json.loads(index.read_text())) if name == Path(name).name}
    return set()


def _renamed(index: Any, names: dict[str, str]) -> Any:
    renamed = {
        path: names[value] if isinstance(value, str) else [names[name] for name in value]
        for path, value in index["weight_map"].items()
    }
    return {**index, "weight_map": renamed}


def _first(names: dict[str, str]) -> list[str]:
    return sorted(names)[:1]


def _link(directory: Path, parent: Path, names: dict[str, str]) -> None:
    for first in _first(names):
        if names[first] != first:
            with suppress(OSError):  # without links, the one that is there remains
                os.link(parent / names[first], directory / first)
                replace(directory / first, parent / first)


def _tagged(index: Path) -> set[str]:
    """Returns the files with tags of this index; some may be those of a process that was killed."""
    base = re.escape(index.stem.replace(".weights", ""))
    tagged = re.compile(rf"{base}_\d{{5}}\.[12]{re.escape(_SUFFIX)}")
    return {file.name for file in index.parent.iterdir() if tagged.fullmatch(file.name)}
