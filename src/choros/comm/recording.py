"""The recording of a timeline: each rank records alone; at the end rank 0 receives all. The sizes are in the message
that ends a job anyway, so a job without a timeline exchanges nothing. If ranks do not agree on the end, as one has
died, the parts stay: chorosrun merges them, and without it each rank that can::

    rank 0   start: agree ─ collectives … ─ end: agree(bytes) ─ alltoall ─► FILE.json ─ agree ─ remove the part
    rank 1   start: agree ─ collectives … ─ end: agree(bytes) ─ alltoall ────────────── agree ─ remove the part
                             └── events ──► FILE.json.parts/ ──┘
"""

import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import Communicator
from choros.comm.process_set import global_process_set
from choros.comm.request import Request
from choros.errors import ConfigError, EngineError, NotInitializedError
from choros.observe import events
from choros.observe.listeners import take_pipe
from choros.observe.timeline import PartWriter, read_part, remove_part, remove_stale_parts

_log = logging.getLogger("choros")


_WRITTEN = Request("timeline written")
_recording: PartWriter | None = None


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts to record what each rank does to a file that https://ui.perfetto.dev opens; all ranks call it.

    A timeline that is being recorded is ended first. In Horovod, it is enough that rank 0 calls it, and
    ``HOROVOD_TIMELINE=DYNAMIC`` must be set; here it need not be.

    Args:
        file_path: the file, on rank 0's host; it is written by ``stop_timeline``, or when the job ends. Until then each
            rank writes to a file of its own in ``FILE_PATH.parts``.
        mark_cycles: also mark the moments at which all ranks have called a collective, as ``CYCLE_START``.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: the file cannot be created.
        MismatchError: not all ranks called it.

    Example:
        >>> import choros, json, pathlib, tempfile
        >>> choros.init()
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     start_timeline(f"{directory}/run.json")
        ...     total = choros.global_process_set.communicator.allreduce(1, name="loss")
        ...     stop_timeline()
        ...     events = json.loads(pathlib.Path(directory, "run.json").read_text())["traceEvents"]
        >>> [event["name"] for event in events if event["ph"] == "X"][-3:]
        ['loss', 'wait', 'transfer']
        >>> choros.shutdown()

    Source: https://horovod.readthedocs.io/en/stable/timeline.html
    """
    communicator = _communicator("start_timeline()")
    end_recording(communicator, Request("start_timeline"))
    start_recording(communicator, os.fspath(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline and writes its file, on rank 0; all ranks call it. Without a timeline, it does nothing else.

    Raises:
        NotInitializedError: before ``init()``.
        MismatchError: not all ranks called it.

    Source: https://horovod.readthedocs.io/en/stable/timeline.html
    """
    end_recording(_communicator("stop_timeline()"), Request("stop_timeline"))


def _communicator(what: str) -> Communicator:
    if global_process_set.process_set_id is None:
        raise NotInitializedError(what)
    return global_process_set.communicator


def start_recording(communicator: Communicator, file_path: str, *, mark_cycles: bool) -> None:
    """Starts a timeline, by all ranks; rank 0's path counts, on its host. ``mark_cycles`` marks when ranks agree."""
    global _recording
    file, rank = Path(file_path).absolute(), communicator.rank
    recording = problem = None
    try:
        if file.is_dir():
            raise IsADirectoryError("it is a directory")
        remove_stale_parts(file, communicator.size)
        # From here on, so that the timeline shows which ranks wait here for others.
        recording = PartWriter(file, rank, communicator.size, mark_cycles=mark_cycles)
    except OSError as error:
        problem = ConfigError(f"the timeline {file} cannot be written: {error}. Give the path of a file.")
    try:
        request = Request("start_timeline", f"mark_cycles={mark_cycles}")
        communicator.agree(request, problem=problem)
    except BaseException:
        if recording is not None:
            recording.end()
            remove_part(file, rank)
        raise
    _recording = recording
    if rank == 0:
        events.emit(events.Kind.RECORDING, str(file))


def end_recording(communicator: Communicator, request: Request) -> None:
    """Ends the timeline, if any, and agrees on ``request``, by all ranks; if rank 0 cannot write it, the parts stay."""
    global _recording
    recording, _recording = _recording, None
    own = b""
    if recording is not None:
        own = zlib.compress(recording.end(), level=1)

    def collective() -> bool:
        counts = communicator.agree(request, value=len(own))
        if not any(counts):
            return False
        others = [0] * (communicator.size - 1)
        expected = counts if communicator.rank == 0 else [0, *others]
        received = communicator.alltoallv_bytes(np.frombuffer(own, np.uint8), [len(own), *others], expected)
        written = communicator.rank == 0 and recording is not None and _write(recording, received, counts)
        return any(communicator.agree(_WRITTEN, value=written))

    try:
        written = communicator.atomic(collective)
    except EngineError:
        if recording is not None:
            _merge_here(recording)
        raise
    if recording is not None and written:
        remove_part(recording.file, recording.rank)


def merge_after_crash() -> None:
    """Merges what this rank finds, if an exception ends it."""
    if _recording is not None:
        _recording.end()
        _merge_here(_recording)


def _merge_here(recording: PartWriter) -> None:
    """Merges the parts that lie here, unless chorosrun does that after the end of all ranks."""
    from choros.trace.files import merge_parts  # takes 10 ms; other jobs do not need it

    if take_pipe() is not None:
        return
    try:
        merge_parts(recording.file)
    except (OSError, ValueError) as error:
        _log.warning("the timeline %s cannot be written: %s.", recording.file, error)


def _write(recording: PartWriter, received: NDArray[np.uint8], counts: Sequence[int]) -> bool:
    """Writes the timeline from the ranks' compressed parts; returns whether that was possible."""
    from choros.trace.files import write_trace

    parts = np.split(received, np.cumsum(counts)[:-1])
    try:
        write_trace(recording.file, [read_part(zlib.decompress(part.tobytes())) for part in parts if part.size])
    except (OSError, ValueError) as error:
        kept = recording.path.parent
        _log.warning(
            "the timeline %s cannot be written: %s. Each rank keeps its part in %s.", recording.file, error, kept
        )
        return False
    return True
