"""Horovod's ``elastic.run``: calls a function again, from the last commit, when a rank was lost.

::

    admit() ─► sync() ─► function(state)
      ▲          ▲          │
      │          │          ├─ returns ────────────────────────────────► the result
      │          │          ├─ a rank was lost ─────► restore()   ─┐
      │          │          └─ hosts have changed ──────────────── ┤
      │          └─────────────── reset(), reset callbacks ◄───────┘
      └──────────────────────────────────┘
"""

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar, cast

from choros.arrays.adapter import error_of_host
from choros.elastic import job
from choros.elastic.preemption import watch_signals
from choros.elastic.state import State
from choros.errors import (
    DriftError,
    EngineError,
    EngineUnavailable,
    HostsUpdatedInterrupt,
    MismatchError,
    PeerLostError,
)

R = TypeVar("R")

_log = logging.getLogger("choros")
#: A call that fails so often without a commit between the failures would fail again.
_TRIES = 3
_ALL_LOST = "all ranks with the state of the training were lost before this one, which is new, had received it."
#: Errors of the program, which a second call would repeat.
_PERMANENT = (DriftError, EngineUnavailable, MismatchError)


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Makes ``func`` a function that survives the loss of ranks (Horovod's ``hvd.elastic.run``).

    ``func`` is called when all ranks have the same state. When a rank is lost, a collective raises
    ``HorovodInternalError`` on all others; when hosts have changed, ``state.commit()`` or
    ``state.check_host_updates()`` raises ``HostsUpdatedInterrupt``. ``func`` must let both pass. It is then called
    again, by the ranks that are left or new, with the state of the last commit, or in the second case the current one.

    The job must have been started by ``chorosrun`` with ``--min-np``; in any other, a lost rank ends it.

    Args:
        func: takes a ``State``, and further arguments.

    Returns:
        A function with the same arguments and result. A rank that was started in the place of a lost one, and comes
        when the others are in a later function, returns what rank 0 has: numbers, texts and arrays; else ``None``.

    Raises:
        HorovodInternalError: ``func`` has raised it three times without a commit in between, and not because ranks
            became fewer.
        PeerLostError: a rank was lost in a job that cannot go on without it.

    Example:
        >>> import choros
        >>> from choros.elastic.state import ObjectState
        >>> choros.init()
        >>> @run
        ... def train(state):
        ...     while state.epoch < 3:
        ...         state.epoch += 1
        ...         state.commit()
        ...     return state.epoch
        >>> train(ObjectState(epoch=0))
        3
    """
    return run_fn(func, lambda: None)


def run_fn(func: Callable[..., R], reset: Callable[[], None]) -> Callable[..., R]:
    """``run`` with a function that is called after each loss or change of hosts, before the reset callbacks."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        return job.shared_result(train(state, *args, **kwargs))

    def train(state: State, *args: Any, **kwargs: Any) -> R:
        failures, commits, present = 0, 0, job.members()
        fewest = present
        with job.opening(), job.raising(), ExitStack() as stack:
            is_nested = job.is_nested()
            state._store = None if is_nested else job.commits()
            stack.callback(watch_signals(None if is_nested else lambda: state._store is not None))
            # A new rank calls the callbacks, too: they may communicate. It receives the state of the others.
            must_reset, must_load, skip_sync = job.is_new(), not job.is_new(), False
            has_state = not job.is_new()
            while True:
                try:
                    if must_load:
                        state.load()
                        must_load = False
                    before = job.members()
                    if not is_nested and not job.admit():
                        return cast(R, None)
                    if must_reset or job.members() > before:
                        reset()
                        state.on_reset()
                    present = job.members()
                    if not skip_sync or job.members() > before:
                        state.sync()
                    has_state = True
                    return func(state, *args, **kwargs)
                except _PERMANENT:
                    raise
                except EngineError as error:
                    if not has_state and state._rank() == 0:  # new ranks are the last: no other has it, either
                        raise PeerLostError(_ALL_LOST, ends_job=True) from error
                    if state._commits != commits:
                        failures, commits, fewest = 0, state._commits, present
                    failures += job.members() >= fewest  # ranks that are lost one after another are no fault of func
                    fewest = min(fewest, job.members())
                    is_final = isinstance(error, PeerLostError) and (error.ends_job or not job.survives())
                    if is_final or failures == _TRIES:
                        raise
                    _log.warning("training goes on from the last commit: %s", error_of_host(error))
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                must_reset = True

    return wrapper
