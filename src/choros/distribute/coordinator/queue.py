"""The queue of scheduled functions, and their assignment to workers.

::

    put ──► waiting ──take──► running ──done──► the RemoteValue has its result
               ▲                 │ ├──failed──► the RemoteValue has its error, those that wait are cancelled,
               └──────lost───────┘ │            and the next put or wait raises it
          (another worker runs it)    └──lost──► the same, after the loss of three workers
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, final

from choros.distribute.coordinator.clocks import Clocks
from choros.distribute.coordinator.definitions import Definition
from choros.distribute.coordinator.remote_value import RemoteValue
from choros.errors import ClosureCancelled, EngineError

__all__ = ["Closure", "ClosureQueue"]

#: A function is not run again after this many workers were lost while running it.
_LOSSES = 3
#: Waits wake up this often, to let Ctrl-C through and to detect that no worker is connected.
_WAKE_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class Closure:
    """A function to be run on a worker, with its arguments, pickled.

    Attributes:
        name: its name in error messages.
        function: the pickled function.
        key: the hash of ``function``.
        arguments: the pickled arguments.
        learning_rates: the learning rates of the scope's optimizers when it was scheduled, by number.
        definitions: of all objects that it uses.
        result: receives the result.
        lost: the workers that were lost while running it.
    """

    name: str
    function: bytes
    key: bytes
    arguments: bytes
    learning_rates: dict[int, float]
    definitions: tuple[Definition, ...] = ()
    result: RemoteValue = field(default_factory=RemoteValue)
    lost: list[str] = field(default_factory=list)


@final
class ClosureQueue:
    """Assigns each closure to one worker, and to another one if that worker is lost.

    Args:
        clocks: decides which worker may start a step.
        start_seconds: how long closures wait while no worker is connected.
    """

    def __init__(self, clocks: Clocks, start_seconds: float) -> None:
        self._clocks = clocks
        self._start_seconds = start_seconds
        self._change = threading.Condition()
        self._waiting: deque[Closure] = deque()
        self._running = 0
        self._error: Exception | None = None
        self._closed = False
        self._workers = 0
        self._refusal = ""
        self._no_worker_since = time.monotonic()

    def put(self, closure: Closure, limit: int) -> None:
        """Adds a closure as soon as fewer than ``limit`` are waiting or running.

        Raises:
            Exception: the error of an earlier closure; ``closure`` is not added then.
            EngineError: no worker is connected.
        """
        with self._change:
            self._wait(lambda: self._error is not None or len(self._waiting) + self._running < limit)
            self._raise()
            self._waiting.append(closure)
            self._change.notify_all()

    def wait(self) -> None:
        """Waits until all closures are done.

        Raises:
            Exception: the error of a closure.
            EngineError: no worker is connected.
        """
        with self._change:
            self._wait(lambda: self._outstanding == 0)
            self._raise()

    @property
    def idle(self) -> bool:
        """Whether all closures are done.

        Raises:
            Exception: the error of a closure.
        """
        with self._change:
            self._raise()
            return self._outstanding == 0

    def close(self) -> None:
        """Closes the queue: ``take`` returns ``None`` from now on."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def add_worker(self) -> None:
        """Records that a worker has connected."""
        with self._change:
            self._workers += 1

    def refused(self, why: str) -> None:
        """Records why a worker could not be connected, for the error of a job without workers."""
        self._refusal = why

    def remove_worker(self, worker: Hashable) -> None:
        """Records that ``worker`` is lost or has ended."""
        with self._change:
            self._workers -= 1
            self._no_worker_since = time.monotonic()
            self._clocks.forget(worker)
            self._change.notify_all()

    def take(self, worker: Hashable) -> Closure | None:
        """Waits for a closure that ``worker`` may start and returns it; ``None`` once the queue is closed."""
        with self._change:
            while not self._closed:
                if self._waiting and self._clocks.may_start(worker):
                    self._running += 1
                    self._clocks.start(worker)
                    return self._waiting.popleft()
                if not self._waiting:
                    self._clocks.mark_idle(worker)
                self._change.wait()
            return None

    def done(self, worker: Hashable, closure: Closure, result: Any) -> None:
        """Records that ``worker`` has finished ``closure``."""
        closure.result.set_result(result)
        with self._change:
            self._clocks.finish(worker)
            self._running -= 1
            self._change.notify_all()

    def failed(self, worker: Hashable, closure: Closure, error: Exception) -> None:
        """Records that ``closure`` raised ``error``; cancels those that wait."""
        with self._change:
            self._clocks.finish(worker)
            self._running -= 1
            self._fail(closure, error)
            self._change.notify_all()

    def lost(self, worker: str, closure: Closure) -> None:
        """Puts ``closure`` back at the front after the loss of ``worker``, or fails it after too many losses."""
        with self._change:
            self._running -= 1
            closure.lost.append(worker)
            if len(closure.lost) == _LOSSES:
                self._fail(
                    closure,
                    EngineError(
                        f"{closure.name} is not run again, because each worker that ran it was lost: "
                        f"{', '.join(closure.lost)}. See their output; a worker that was killed may have run out of "
                        "memory."
                    ),
                )
            else:
                self._waiting.appendleft(closure)
            if self._error is not None:
                self._cancel()
            self._change.notify_all()

    @property
    def _outstanding(self) -> int:
        return len(self._waiting) + self._running

    def _fail(self, closure: Closure, error: Exception) -> None:
        closure.result.set_error(error)
        self._error = self._error or error
        self._cancel()

    def _cancel(self) -> None:
        while self._waiting:
            self._waiting.popleft().result.set_error(
                ClosureCancelled("this function was not run, because a function scheduled before it failed.")
            )

    def _raise(self) -> None:
        """Raises the error of a closure once, after all running closures have ended."""
        if self._error is not None:
            self._wait(lambda: self._running == 0)
            error, self._error = self._error, None
            raise error

    def _wait(self, condition: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not condition():
            idle = time.monotonic() - max(begin, self._no_worker_since)
            if self._workers == 0 and idle > self._start_seconds:
                self._cancel()
                raise EngineError(
                    f"no worker has been connected for {self._start_seconds:g} s while functions wait to be run: check "
                    f"the workers' output. CHOROS_START_TIMEOUT sets the time limit. {self._refusal}".rstrip()
                )
            self._change.wait(_WAKE_SECONDS)
