"""The functions that are to be run, and who runs them.

::

    put ──► waiting ──take──► running ──done──► the RemoteValue has its result
               ▲                 │ ├──failed──► the RemoteValue has its error, those that wait are cancelled,
               └──────lost───────┘ │            and the next put or wait raises it
          (it runs on another worker) └──lost──► the same, when it has cost three workers
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, final

from choros.distribute.coordinator.clocks import Clocks
from choros.distribute.coordinator.remote_value import RemoteValue
from choros.errors import ClosureCancelled, EngineError

__all__ = ["Closure", "ClosureQueue"]

#: A function under which so many workers were lost is not given to another one.
_LOSSES = 3
#: A wait that is woken up now and then lets Ctrl-C through, and sees that there are no workers.
_WAKE_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class Closure:
    """A function to be run on a worker, as it travels.

    Attributes:
        name: what it is called in errors.
        function: its bytes.
        key: equal for functions whose bytes are.
        arguments: the bytes of its arguments.
        learning_rates: of the scope's optimizers when it was scheduled, by their numbers.
        result: where the result goes.
        lost: the workers that were lost while they were at it.
    """

    name: str
    function: bytes
    key: bytes
    arguments: bytes
    learning_rates: dict[int, float]
    result: RemoteValue = field(default_factory=RemoteValue)
    lost: list[str] = field(default_factory=list)


@final
class ClosureQueue:
    """Hands closures to workers, each to one; to another if that one is lost.

    Args:
        clocks: decides which worker may go on.
        start_seconds: how long closures wait for any worker to come.
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
        self._alone_since = time.monotonic()

    def put(self, closure: Closure, limit: int) -> None:
        """Adds a closure, as soon as fewer than ``limit`` are waiting or running.

        Raises:
            Exception: of an earlier closure; ``closure`` is not added then.
            EngineError: there are no workers.
        """
        with self._change:
            self._wait(lambda: self._error is not None or len(self._waiting) + self._running < limit)
            self._raise()
            self._waiting.append(closure)
            self._change.notify_all()

    def wait(self) -> None:
        """Returns when all closures are done.

        Raises:
            Exception: of one of them.
            EngineError: there are no workers.
        """
        with self._change:
            self._wait(lambda: self._outstanding == 0)
            self._raise()

    @property
    def idle(self) -> bool:
        """Whether all closures are done.

        Raises:
            Exception: of one of them.
        """
        with self._change:
            self._raise()
            return self._outstanding == 0

    def close(self) -> None:
        """Lets workers end when they are done with what they are at."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def came(self) -> None:
        """There is one more worker."""
        with self._change:
            self._workers += 1

    def left(self, worker: Hashable) -> None:
        """``worker`` is lost, or done."""
        with self._change:
            self._workers -= 1
            self._alone_since = time.monotonic()
            self._clocks.forget(worker)
            self._change.notify_all()

    def take(self, worker: Hashable) -> Closure | None:
        """The next closure for ``worker``, when there is one that it may start; ``None`` when there will be none."""
        with self._change:
            while not self._closed:
                if self._waiting and self._clocks.may_start(worker):
                    self._running += 1
                    self._clocks.start(worker)
                    return self._waiting.popleft()
                if not self._waiting:
                    self._clocks.rest(worker)
                self._change.wait()
            return None

    def done(self, worker: Hashable, closure: Closure, result: Any) -> None:
        """``worker`` is done with ``closure``."""
        closure.result.set_result(result)
        with self._change:
            self._clocks.finish(worker)
            self._running -= 1
            self._change.notify_all()

    def failed(self, worker: Hashable, closure: Closure, error: Exception) -> None:
        """``closure`` raised ``error``."""
        with self._change:
            self._clocks.finish(worker)
            self._running -= 1
            self._fail(closure, error)
            self._change.notify_all()

    def lost(self, worker: str, closure: Closure) -> None:
        """``worker`` is lost, which was at ``closure``: it is the next to be run, unless it costs too many workers."""
        with self._change:
            self._running -= 1
            closure.lost.append(worker)
            if len(closure.lost) == _LOSSES:
                self._fail(
                    closure,
                    EngineError(
                        f"{closure.name} is not run again, because each worker that ran it was lost: "
                        f"{', '.join(closure.lost)}. See what they printed; a worker that is killed may have run out "
                        "of memory."
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
                ClosureCancelled("this function was not run, because another one that was scheduled before it failed.")
            )

    def _raise(self) -> None:
        """Raises what a closure raised, once; nothing runs any more then."""
        if self._error is not None:
            self._wait(lambda: self._running == 0)
            error, self._error = self._error, None
            raise error

    def _wait(self, condition: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not condition():
            alone = time.monotonic() - max(begin, self._alone_since)
            if self._workers == 0 and alone > self._start_seconds:
                self._cancel()
                raise EngineError(
                    f"there has been no worker for {self._start_seconds:g} s, and functions wait to be run: check "
                    "what the workers printed. CHOROS_START_TIMEOUT sets how long to wait."
                )
            self._change.wait(_WAKE_SECONDS)
