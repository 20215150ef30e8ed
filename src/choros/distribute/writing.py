"""Files that one process writes for all that name the same path.

::

    process 0          process 1          process 2
    "a" ───────────────"a" ───────────────"b/tmp"      the paths are exchanged
    writes             waits              writes       the first process with a path writes it
    ok, or an error ── ok ─────────────── ok           all learn of an error; then all files exist
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from choros.comm import global_process_set
from choros.distribute.scope import enter_fit, in_fit
from choros.errors import StrategyError
from choros.observe import events
from choros.observe.events import Kind
from choros.parallel.objects import allgather_object

__all__ = ["is_writing", "write_once"]


class _Thread(threading.local):
    writing = False


_thread = _Thread()


def is_writing() -> bool:
    """Whether this process writes files for others, and so must not communicate."""
    return _thread.writing


def write_once(write: Callable[[], Any], path: str = "") -> Any:
    """Calls ``write`` on the first process of those that give the same ``path``; all processes wait.

    In ``fit``, where a callback may write on one process only, only process 0 writes, and the others return ``None``.
    A call within ``write`` only calls its own.

    Args:
        write: writes the files of ``path``.
        path: names them.

    Returns:
        The result of ``write`` on the process that wrote; it must be picklable.

    Raises:
        StrategyError: on the other processes, if one could not write.
    """
    if _thread.writing:
        return write()
    communicator = global_process_set.communicator
    if in_fit():
        return _write(write, path) if communicator.rank == 0 else None
    paths = allgather_object(path, name="files to write")
    writer = paths.index(path)
    result: Any = None
    problem: Exception | None = None
    if writer == communicator.rank:
        try:
            with enter_fit():  # objects that saving creates must not start collectives
                result = _write(write, path)
        except Exception as error:  # noqa: BLE001  (raised below, once the others have received it)
            problem = error
    reported = None if problem is None else f"{type(problem).__name__}: {problem}"
    outcomes = allgather_object((result, reported), name="files written")
    if problem is not None:
        raise problem
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise StrategyError(f"process {rank}, which writes {paths[rank] or 'for all processes'}, failed: {failure}")
    return outcomes[writer][0]


def _write(write: Callable[[], Any], path: str) -> Any:
    with _writing():
        result = write()
    events.emit(Kind.CHECKPOINT, path)
    return result


@contextmanager
def _writing() -> Iterator[None]:
    _thread.writing = True
    try:
        yield
    finally:
        _thread.writing = False
