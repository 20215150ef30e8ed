"""Files of all processes, written by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from choros.comm import global_process_set
from choros.distribute.scope import enter_fit, in_fit
from choros.errors import StrategyError
from choros.parallel.objects import broadcast_object

__all__ = ["write_once"]


def write_once(write: Callable[[], Any]) -> Any:
    """Calls ``write`` on process 0; returns when it is done, everywhere, with what it returned.

    In ``fit``, where a callback may decide on one process alone to write something, the others do not wait, and get
    ``None``.

    Raises:
        StrategyError: on the other processes, if process 0 could not write.
    """
    first = global_process_set.communicator.rank == 0
    if in_fit():
        return write() if first else None
    result: Any = None
    problem: Exception | None = None
    if first:
        try:
            with enter_fit():  # what saving makes for itself concerns no other process
                result = write()
        except Exception as error:  # noqa: BLE001  (raised below, once the others know)
            problem = error
    told = None if problem is None else f"{type(problem).__name__}: {problem}"
    result, told = broadcast_object((result, told))
    if problem is not None:
        raise problem
    if told is not None:
        raise StrategyError(f"process 0, which writes for all, could not: {told}")
    return result
