"""The files of a timeline: the parts, and the merged one.

::

    FILE.json                     written whole, then renamed to this name: at any time it is absent or complete
    FILE.json.parts/rank-3.jsonl  while rank 3 records, and if the job did not come to merge it
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from choros.durable import unfinished
from choros.observe.timeline import TimelinePart, part_files, read_part, remove_part
from choros.trace.chrome import from_json, to_json
from choros.trace.trace import Trace, merge


def write_trace(file: Path, parts: Iterable[TimelinePart]) -> None:
    """Merges ``parts`` to ``file``; a reader sees the old file or the new one, never a part of it."""
    # Without chorosrun, several ranks may merge what an exception has left.
    with unfinished(file) as name, name.open("w") as output:
        output.writelines(to_json(merge(parts)))


def merge_parts(file: Path) -> bool:
    """Merges the parts that lie beside ``file`` to it; returns whether there are any."""
    parts = _read_parts(file)
    if parts:
        write_trace(file, parts)
    return bool(parts)


def read_trace(file: Path) -> Trace:
    """Returns the trace of the parts beside ``file``, else that in it; ``FileNotFoundError``: neither is there."""
    parts = _read_parts(file)
    return merge(parts) if parts else from_json(file.read_bytes())


def merge_left_parts(file: Path) -> None:
    """Merges the parts that ranks have left, which have ended, and removes them."""
    if merge_parts(file):
        for rank in part_files(file):
            remove_part(file, rank)


def _read_parts(file: Path) -> list[TimelinePart]:
    parts = []
    for path in part_files(file).values():
        # It is empty, because its rank was killed when it had just created it; or its rank has removed it by now.
        with suppress(ValueError, FileNotFoundError):
            parts.append(read_part(path.read_bytes()))
    return parts
