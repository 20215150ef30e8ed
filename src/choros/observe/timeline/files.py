"""The files of a timeline: the parts, and the merged one.

::

    FILE.json                     written whole, then renamed to this name: at any time it is absent or complete
    FILE.json.parts/rank-3.jsonl  while rank 3 records, and if the job did not come to merge it
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from choros.observe.timeline.chrome import from_json, to_json
from choros.observe.timeline.part import TimelinePart, read_part
from choros.observe.timeline.trace import Trace, merge

__all__ = [
    "merge_left_parts",
    "merge_parts",
    "part_path",
    "parts_directory",
    "read_trace",
    "remove_part",
    "remove_stale_parts",
    "write_trace",
]

_NAME = re.compile(r"rank-(\d+)\.jsonl")


def parts_directory(file: Path) -> Path:
    """The directory of the parts of the timeline ``file``.

    Example:
        >>> parts_directory(Path("run.json")).name
        'run.json.parts'
    """
    return file.with_name(file.name + ".parts")


def part_path(file: Path, rank: int) -> Path:
    """The file of the part of ``rank``."""
    return parts_directory(file) / f"rank-{rank}.jsonl"


def write_trace(file: Path, parts: Iterable[TimelinePart]) -> None:
    """Merges ``parts`` to ``file``; a reader sees the old file or the new one, never a part of it."""
    # Without chorosrun, several ranks may merge what an exception has left.
    unfinished = file.with_name(f"{file.name}.unfinished-{os.uname().nodename}-{os.getpid()}")
    try:
        with unfinished.open("w") as output:
            output.writelines(to_json(merge(parts)))
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def merge_parts(file: Path) -> bool:
    """Merges the parts that lie beside ``file`` to it; returns whether there are any."""
    parts = _read_parts(file)
    if parts:
        write_trace(file, parts)
    return bool(parts)


def read_trace(file: Path) -> Trace:
    """Returns the trace of the parts that lie beside ``file``; if there are none, that in ``file``.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: the file is not a timeline.
    """
    parts = _read_parts(file)
    return merge(parts) if parts else from_json(file.read_bytes())


def merge_left_parts(file: Path) -> None:
    """Merges the parts that ranks have left, which have ended, and removes them."""
    if merge_parts(file):
        for rank in _part_files(file):
            remove_part(file, rank)


def remove_part(file: Path, rank: int) -> None:
    """Removes the part of ``rank``, and the directory after the last one."""
    part_path(file, rank).unlink(missing_ok=True)
    with suppress(OSError):  # others have theirs
        parts_directory(file).rmdir()


def remove_stale_parts(file: Path, size: int) -> None:
    """Removes parts of ranks that a job of ``size`` ranks does not have; it overwrites those of others."""
    for rank in _part_files(file):
        if rank >= size:
            remove_part(file, rank)


def _part_files(file: Path) -> dict[int, Path]:
    directory = parts_directory(file)
    names = os.listdir(directory) if directory.is_dir() else []
    found = ((match, directory / match[0]) for match in map(_NAME.fullmatch, names) if match)
    return {int(match[1]): path for match, path in found}


def _read_parts(file: Path) -> list[TimelinePart]:
    parts = []
    for path in _part_files(file).values():
        # It is empty, because its rank was killed when it had just created it; or its rank has removed it by now.
        with suppress(ValueError, FileNotFoundError):
            parts.append(read_part(path.read_bytes()))
    return parts
