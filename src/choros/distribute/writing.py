"""Files that one process writes for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from choros.comm import global_process_set
from choros.distribute.scope import enter_fit, in_fit
from choros.errors import StrategyError
from choros.observe import events
from choros.observe.events import Kind
from choros.parallel.objects import broadcast_object

__all__ = ["write_once"]


def write_once(write: Callable[[], Any]) -> Any:
    """Calls ``write`` on process 0; all processes wait for it and return its result.

    In ``fit``, where a callback may write on one process only, the others do not wait, and return ``None``.

    Raises:
        StrategyError: on the other processes, if process 0 could not write.
    """
    first = global_process_set.communicator.rank == 0
    if in_fit():
        return _write(write) if first else None
    result: Any = None
    problem: Exception | None = None
    if first:
        try:
            with enter_fit():  # objects that saving creates must not start collectives
                result = _write(write)
        except Exception as error:  # noqa: BLE001  (raised below, once the others have received it)
            problem = error
    reported = None if problem is None else f"{type(problem).__name__}: {problem}"
    result, reported = broadcast_object((result, reported))
    if problem is not None:
        raise problem
    if reported is not None:
        raise StrategyError(f"process 0, which writes for all processes, failed: {reported}")
    return result


def _write(write: Callable[[], Any]) -> Any:
    result = write()
    events.emit(Kind.CHECKPOINT, str(result) if isinstance(result, str | os.PathLike) else "")
    return result
