"""The recording of a timeline: each rank records alone; where it ends, rank 0 receives what all have recorded.

::

    rank 0   start: agree ─ collectives … ─ end: agree(bytes) ─ alltoall ─► FILE.json ─ agree ─ remove the part
    rank 1   start: agree ─ collectives … ─ end: agree(bytes) ─ alltoall ────────────── agree ─ remove the part
                             └── events ──► FILE.json.parts/ ──┘

The control message that ends a job, or a timeline, carries the number of bytes that each rank has recorded, so a job
without a timeline exchanges nothing for it. If ranks do not agree on the end, because one has died or has left, the
parts stay where they are: chorosrun merges them when all ranks have ended, and without it each rank that can does.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from choros.comm.communicator import Communicator
from choros.comm.request import Request
from choros.errors import ConfigError, EngineError
from choros.observe import events
from choros.observe.pipe import take_descriptor
from choros.observe.timeline.part import RECORDED, PartHeader, PartWriter

__all__ = ["end_recording", "merge_after_crash", "start_recording"]

_log = logging.getLogger("choros")


@dataclass(frozen=True)
class _Recording:
    """A timeline that this rank records."""

    file: Path
    part: PartWriter
    stop_listening: Callable[[], None]
    remove_part: Callable[[], None]


_WRITTEN = Request("timeline written")
_recording: _Recording | None = None


def start_recording(communicator: Communicator, file_path: str, *, mark_cycles: bool) -> None:
    """Starts a timeline of all ranks; each of them calls it.

    Args:
        communicator: that of all ranks.
        file_path: the file; rank 0's counts, on its host.
        mark_cycles: whether the trace marks the moments at which ranks agree.

    Raises:
        ConfigError: the file cannot be created.
        MismatchError: another rank's cannot, or another rank does something else.
    """
    from choros.observe.timeline import files  # takes 10 ms; other jobs do not need it

    global _recording
    file, rank = Path(file_path).absolute(), communicator.rank
    part: PartWriter | None = None
    problem: ConfigError | None = None
    try:
        if file.is_dir():
            raise IsADirectoryError("it is a directory")
        header = PartHeader.of_this_process(rank, communicator.size, mark_cycles=mark_cycles)
        part = PartWriter(files.part_path(file, rank), header)
        files.remove_stale_parts(file, communicator.size)
    except OSError as error:
        problem = ConfigError(f"the timeline {file} cannot be written: {error}. Give the path of a file.")
    # From here on, so that the timeline shows which ranks wait here for others.
    stop_listening = _nothing if part is None else events.listen(part.write, RECORDED)
    try:
        request = Request("start_timeline", f"mark_cycles={mark_cycles}")
        communicator.atomic(lambda: communicator.agree(request, problem=problem))
    except BaseException:
        stop_listening()
        if part is not None:
            part.end()
            files.remove_part(file, rank)
        raise
    assert part is not None  # noqa: S101  (otherwise the problem was raised)
    _recording = _Recording(file, part, stop_listening, partial(files.remove_part, file, rank))
    if rank == 0:
        events.emit(events.Kind.RECORDING, str(file))


def end_recording(communicator: Communicator, request: Request) -> None:
    """Ends the timeline, if there is one, and agrees on ``request``; each rank calls it.

    Rank 0 receives the parts of all ranks and writes the file. If that fails, it says so, and the parts are kept.

    Raises:
        MismatchError: another rank does something else.
        EngineError: another rank has died.
    """
    global _recording
    recording, _recording = _recording, None
    own = b""
    if recording is not None:
        recording.stop_listening()
        own = zlib.compress(recording.part.end(), level=1)

    def collective() -> bool:
        counts = communicator.agree(request, value=len(own))
        if not any(counts):
            return False
        others = [0] * (communicator.size - 1)
        expected = counts if communicator.rank == 0 else [0, *others]
        received = communicator.alltoallv_bytes(np.frombuffer(own, np.uint8), [len(own), *others], expected)
        written = communicator.rank == 0 and recording is not None and _write(recording, received.tobytes(), counts)
        return any(communicator.agree(_WRITTEN, value=written))

    try:
        written = communicator.atomic(collective)
    except EngineError:
        if recording is not None:
            _merge_here(recording)
        raise
    if recording is not None and written:
        recording.remove_part()


def merge_after_crash() -> None:
    """Merges what this rank finds, if an exception ends it."""
    if _recording is not None:
        _recording.stop_listening()
        _recording.part.end()
        _merge_here(_recording)


def _nothing() -> None:
    pass


def _merge_here(recording: _Recording) -> None:
    """Merges the parts that lie here, unless chorosrun does that after the end of all ranks."""
    from choros.observe.timeline.files import merge_parts

    if take_descriptor() is not None:
        return
    try:
        merge_parts(recording.file)
    except OSError as error:
        _log.warning("the timeline %s cannot be written: %s.", recording.file, error)


def _write(recording: _Recording, received: bytes, counts: Sequence[int]) -> bool:
    """Writes the timeline from the ranks' compressed parts; returns whether that was possible."""
    from choros.observe.timeline.files import write_trace
    from choros.observe.timeline.part import read_part

    parts, begin = [], 0
    for count in counts:
        parts.append(received[begin : begin + count])
        begin += count
    try:
        write_trace(recording.file, [read_part(zlib.decompress(part)) for part in parts if part])
    except (OSError, ValueError) as error:
        kept = recording.part.path.parent
        _log.warning(
            "the timeline %s cannot be written: %s. Each rank keeps its part in %s.", recording.file, error, kept
        )
        return False
    return True
