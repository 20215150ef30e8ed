"""A part of a timeline: the events of one rank, in a file of its own.

::

    {"part":1,"rank":0,"size":2,"host":"a","clock":"4f…","wall":17…,"began":81…,"mark_cycles":false}
    ["collective begun","loss",81735123456789,140291518815104,{"collective":"allreduce"}]
      kind               name   nanoseconds    thread          details

Times are those of the monotonic clock that all processes of the host share. Each event is written at once, as one
line: the kernel keeps it when the process is killed. Only the last line may be incomplete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from choros.observe.events import Event, Kind, listen
from choros.ownership import overwrite, owned_directory

#: The kinds of events in a timeline. ``WAITING`` shows how long a rank has waited that is killed before its wait ends.
RECORDED = (
    Kind.COLLECTIVE_BEGUN, Kind.COLLECTIVE_MATCHED, Kind.COLLECTIVE_DONE, Kind.BUCKET_BEGUN, Kind.BUCKET_DONE,
    Kind.STEP_BEGUN, Kind.STEP_DONE, Kind.EPOCH_BEGUN, Kind.EPOCH_DONE, Kind.COMMIT, Kind.CHECKPOINT, Kind.RANK_CRASHED,
    Kind.WAITING,
)  # fmt: skip
#: The kind of the last record, of a part that was ended in order.
_ENDED = "ended"
_FORMAT = 1
_TRIES = 100
_NAME = re.compile(r"rank-(\d+)\.jsonl")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger("choros")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def parts_directory(file: Path) -> Path:
    """The directory of the parts of the timeline ``file``.

    >>> parts_directory(Path("run.json")).name
    'run.json.parts'
    """
    return file.with_name(file.name + ".parts")


def part_path(file: Path, rank: int) -> Path:
    """The file of the part of ``rank``."""
    return parts_directory(file) / f"rank-{rank}.jsonl"


def part_files(file: Path) -> dict[int, Path]:
    """The parts beside the timeline ``file``, by rank."""
    directory = parts_directory(file)
    names = os.listdir(directory) if directory.is_dir() else []
    found = ((match, directory / match[0]) for match in map(_NAME.fullmatch, names) if match)
    return {int(match[1]): path for match, path in found}


def remove_part(file: Path, rank: int) -> None:
    """Removes the part of ``rank``, and the directory after the last one; an ``OSError`` if that is a link, or another
    user's.
    """
    path = part_path(file, rank)
    with suppress(FileNotFoundError), owned_directory(path.parent) as directory:
        os.unlink(path.name, dir_fd=directory)
    with suppress(OSError):  # others have theirs
        parts_directory(file).rmdir()


def remove_stale_parts(file: Path, size: int) -> None:
    """Removes parts of ranks that a job of ``size`` ranks does not have; it overwrites those of others."""
    for rank in part_files(file):
        if rank >= size:
            remove_part(file, rank)


@dataclass(frozen=True)
class Record:
    """An event in a part; its time is nanoseconds of the host's clock."""

    kind: Kind
    name: str
    time: int
    thread: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class TimelinePart:
    """What one rank has recorded, in the order written. Ranks with the same ``clock`` share one, 0 at ``wall``, in ns
    since 1970. ``ended``: the last event's time if it did not end in order.
    """

    rank: int
    size: int
    host: str
    clock: str
    wall: int
    began: int
    mark_cycles: bool
    records: tuple[Record, ...]
    ended: int


@final
class PartWriter:
    """Records the events of this rank, from when it is made to ``end``, in its part of the timeline ``file``, which it
    creates with its directory, or raises an ``OSError``.
    """

    def __init__(self, file: Path, rank: int, size: int, *, mark_cycles: bool = False) -> None:
        self.file, self.rank, self.path = file, rank, part_path(file, rank)
        self._everyone = tuple(range(size))
        host, now = os.uname().nodename, time.perf_counter_ns()
        # The kernel's name for this boot is the same in all containers and namespaces, which share its clock.
        clock = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else host
        header: dict[str, Any] = {"part": _FORMAT, "rank": rank, "size": size, "host": host, "clock": clock}
        header |= {"wall": time.time_ns() - now, "began": now, "mark_cycles": mark_cycles}
        self._descriptor: int | None = _create(self.path)
        self._write(_encode(header))
        self._stop_listening = listen(self.write, RECORDED)

    def write(self, event: Event) -> None:
        """Writes ``event``, which happens now."""
        now = time.perf_counter_ns()
        details = event.details
        if event.kind is Kind.COLLECTIVE_MATCHED:  # its other details are those of COLLECTIVE_BEGUN
            details = {"number": details["number"]}
        elif event.kind is Kind.COLLECTIVE_DONE:
            details = {"bytes": details["bytes"]}
        elif details.get("process_set") == self._everyone:
            details = {name: value for name, value in details.items() if name != "process_set"}
        # Of its parts, a line is put together in half of the time that the encoder takes for all of it.
        fields = ",".join(
            [f'"{name}":{value if type(value) is int else _encode(value)}' for name, value in details.items()]
        )
        line = f"[{_encode(event.kind)},{_encode(event.name)},{now},{threading.get_ident()},{{{fields}}}]"
        self._write(line)

    def end(self) -> bytes:
        """Ends the part and returns its content."""
        self._stop_listening()
        self._write(_encode((_ENDED, "", time.perf_counter_ns(), 0, {})))
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        return self.path.read_bytes()

    def _write(self, line: str) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line.encode() + b"\n")
        except OSError as error:  # no space left: training goes on
            _log.warning("the timeline ends here: %s cannot be written (%s).", self.path, error)
            os.close(self._descriptor)
            self._descriptor = None


def _create(path: Path) -> int:
    """Creates a file, and its directory, which ranks that end an earlier timeline may remove at the same time."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return overwrite(path, os.O_APPEND)
    raise FileNotFoundError(f"{path.parent} is removed again and again")


def read_part(content: bytes) -> TimelinePart:
    """Returns the part with this content; a ``ValueError`` if it is not a part of a timeline.

    >>> line = b'{"part":1,"rank":0,"size":1,"host":"a","clock":"c","wall":0,"began":5,"mark_cycles":false}'
    >>> read_part(line + b'\\n["commit","",7,1,{}]\\n["commit","",9,').ended
    7
    """
    first, *lines = content.split(b"\n")
    records: list[Record] = []
    try:
        fields = json.loads(first)
        if fields.pop("part") != _FORMAT:
            raise ValueError("another version of choros has written it")
        part = TimelinePart(**fields, records=(), ended=fields["began"])
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{first!r:.100} does not begin a part of a timeline: {error}") from error
    ended = part.ended
    for line in lines:
        try:
            kind, name, ended, thread, details = json.loads(line)
        except (ValueError, TypeError):  # incomplete
            continue
        if kind in RECORDED:
            records.append(Record(Kind(kind), name, ended, thread, details))
    return replace(part, records=tuple(records), ended=ended)
