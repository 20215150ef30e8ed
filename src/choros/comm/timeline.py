"""Horovod's functions that record a timeline."""

from __future__ import annotations

import os

from choros.comm.context import global_process_set
from choros.comm.recording import end_recording, start_recording
from choros.comm.request import Request
from choros.errors import NotInitializedError

__all__ = ["start_timeline", "stop_timeline"]


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
    _check("start_timeline()")
    end_recording(global_process_set.communicator, Request("start_timeline"))
    start_recording(global_process_set.communicator, os.fspath(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline and writes its file, on rank 0; all ranks call it. Without a timeline, it does nothing else.

    Raises:
        NotInitializedError: before ``init()``.
        MismatchError: not all ranks called it.

    Source: https://horovod.readthedocs.io/en/stable/timeline.html
    """
    _check("stop_timeline()")
    end_recording(global_process_set.communicator, Request("stop_timeline"))


def _check(what: str) -> None:
    if global_process_set.process_set_id is None:
        raise NotInitializedError(what)
