"""The queue of scheduled functions, their assignment to workers, their results, and which workers are slow.

::

    put ──► waiting ──take──► running ──done──► the future has its result
               ▲                 │ ├──failed──► the future has its error, those that wait are cancelled,
               └──────lost───────┘ │            and the next put or wait raises it
          (another worker runs it)    └──lost──► the same, after the loss of three workers
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, final

from choros import durations
from choros.arrays import adapter_of
from choros.arrays.adapter import NumpyArrays
from choros.errors import ClosureCancelled, EngineError, StrategyError
from choros.parameter_server.messages import Definition

#: The runs of a function on a worker, without the first one, which compiles it.
_FEWEST_RUNS = 10
_SLOW = 1.5


@final
class Clocks:
    """Steps done and active workers; none starts a step more than ``bound`` (``None``: any) ahead of an active one.

    ::

        worker   steps done          may it start the next one, with a bound of 2?
          0      █ █ █ █             no: it would be 3 steps ahead of worker 1, which is active
          1      █ ▒                 yes
          2      (lost or idle)      is not counted

    After Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013), but
    only active workers block others: one that is active again starts at most the bound behind the fastest.

    >>> clocks = Clocks(bound=0)
    >>> clocks.start("a"), clocks.start("b"), clocks.finish("a")
    (None, None, None)
    >>> clocks.may_start("a")
    False
    >>> clocks.finish("b")
    >>> clocks.may_start("a")
    True
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._done: dict[Hashable, int] = {}
        self._active: set[Hashable] = set()

    def may_start(self, worker: Hashable) -> bool:
        """Returns whether the worker may start a step now."""
        if self._bound is None:
            return True
        done = self._done.get(worker, 0)
        return all(done - self._done[other] <= self._bound for other in self._active)

    def start(self, worker: Hashable) -> None:
        """Records that the worker starts a step."""
        if worker not in self._active:
            most = max(self._done.values(), default=0)
            self._done[worker] = max(self._done.get(worker, 0), most - (self._bound or 0))
            self._active.add(worker)

    def finish(self, worker: Hashable) -> None:
        """Records that the worker has finished its step."""
        self._done[worker] += 1

    def mark_idle(self, worker: Hashable) -> None:
        """Records that no work is available for the worker."""
        self._active.discard(worker)

    def forget(self, worker: Hashable) -> None:
        """Removes a worker that is lost."""
        self._done.pop(worker, None)
        self._active.discard(worker)


@final
class WorkerTimes:
    """Compares the workers of a job. None waits for a slow one, whose updates use older variables.

    >>> times = WorkerTimes()
    >>> for _ in range(11):
    ...     times.note("worker 0", "step", 0.1, 0.02)
    ...     times.note("worker 1", "step", 0.3, 0.03)
    >>> times.sentence()
    'worker 1 is slower than the others: step takes 0.3 s there (10 % waiting for servers), 0.1 s elsewhere'
    >>> times.sentence()
    ''
    """

    def __init__(self) -> None:
        #: By function and worker: the runs, their seconds, and those of them that it has waited for servers.
        self._runs: dict[str, dict[str, tuple[int, float, float]]] = {}
        self._shown: set[str] = set()

    def note(self, worker: str, function: str, seconds: float, waiting: float) -> None:
        """Notes a run."""
        of_function = self._runs.setdefault(function, {})
        if worker in of_function:
            runs, total, waited = of_function[worker]
            of_function[worker] = runs + 1, total + seconds, waited + waiting
        else:
            of_function[worker] = 0, 0.0, 0.0

    def sentence(self) -> str:
        """Returns a sentence about a worker that is slow, and was not named before; empty if there is none."""
        for function, of_function in self._runs.items():
            means = {worker: total / runs for worker, (runs, total, _) in of_function.items() if runs >= _FEWEST_RUNS}
            for worker, own in means.items():
                others = [mean for other, mean in means.items() if other != worker]
                if worker in self._shown or not others or own < _SLOW * statistics.median(others):
                    continue
                self._shown.add(worker)
                _, total, waited = of_function[worker]
                return (
                    f"{worker} is slower than the others: {function} takes {own:.2g} s there "
                    f"({100 * waited / total:.0f} % waiting for servers), {statistics.median(others):.2g} s elsewhere"
                )
        return ""


#: A function is not run again after this many workers were lost while running it.
_LOSSES = 3


@dataclass(frozen=True, eq=False)
class Closure:
    """A function to run on a worker, by its key; learning rates as scheduled, ``lost``: workers lost running it."""

    name: str
    function: bytes
    arguments: bytes
    learning_rates: dict[int, float]
    definitions: tuple[Definition, ...] = ()
    result: Future[Any] = field(default_factory=Future)
    lost: list[str] = field(default_factory=list)


@final
class ClosureQueue:
    """Assigns each closure to one worker, to another if that is lost; the clocks decide who may start."""

    def __init__(self, clocks: Clocks, start_seconds: float) -> None:
        self._clocks = clocks
        self._start_seconds = start_seconds
        self._change = threading.Condition()
        self._waiting: deque[Closure] = deque()
        self._running = 0
        self._error: BaseException | None = None
        self._closed = False
        self._workers = 0
        self._refusal = ""
        self._no_worker_since = time.monotonic()

    def put(self, closure: Closure, limit: int) -> None:
        """Adds a closure once fewer than ``limit`` are open; an earlier closure's error is raised instead of adding."""
        with self._change:
            self._wait(lambda: self._error is not None or self._outstanding < limit)
            self._raise()
            self._waiting.append(closure)
            self._change.notify_all()

    def wait(self) -> None:
        """Waits until all closures are done; raises a closure's error, or EngineError if no worker is connected."""
        with self._change:
            self._wait(lambda: self._outstanding == 0)
            self._raise()

    def result_of(self, future: Future[Any]) -> Any:
        """Waits for a closure; raises its error, or EngineError if no worker is connected."""
        with self._change:
            self._wait(future.done)
        return future.result()

    @property
    def idle(self) -> bool:
        """Whether all closures are done; raises a closure's error."""
        with self._change:
            self._raise()
            return self._outstanding == 0

    def close(self) -> str:
        """Closes the queue, so that ``take`` returns ``None``; returns what is lost so, a sentence, or nothing."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            if self._error is not None:
                return f"a scheduled function has failed, and no join() has raised its error: {self._error!r}."
            left = self._outstanding
            return f"scheduled functions that have not been run: {left}; join() waits for them." if left else ""

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

    def failed(self, worker: Hashable, closure: Closure, error: BaseException) -> None:
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

    def _fail(self, closure: Closure, error: BaseException) -> None:
        closure.result.set_exception(error)
        self._error = self._error or error
        self._cancel()

    def _cancel(self) -> None:
        while self._waiting:
            self._waiting.popleft().result.set_exception(
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
            self._change.wait(durations.QUEUE_LOOK)


@final
class RemoteValue:
    """The result of a scheduled function (``tf.distribute.experimental.coordinator.RemoteValue``)."""

    def __init__(
        self, future: Future[Any] | None = None, wait: Callable[[Future[Any]], Any] = Future[Any].result
    ) -> None:
        self._future = Future() if future is None else future
        self._wait = wait

    def get(self) -> Any:
        """Waits for the function and returns its result; tensors stay tensors.

        Raises:
            ClosureCancelled: the function was not run, because a function scheduled before it failed.
            EngineError: no worker has been connected for ``CHOROS_START_TIMEOUT`` seconds.
            Exception: the error that the function raised.
        """
        return self._wait(self._future)

    def fetch(self) -> Any:
        """Returns the result of ``get`` with tensors converted to NumPy arrays."""
        import keras

        return keras.tree.map_structure(_host, self.get())


@dataclass(frozen=True)
class PerWorkerValues:
    """A value that each worker has its own of; passed to ``schedule``, it is replaced by that of the worker.

    Attributes:
        dataset: the number of the ``create_per_worker_dataset`` call.
        iterator: the number of the iterator over that data set.
    """

    dataset: int
    iterator: int

    def __iter__(self) -> PerWorkerValues:
        return self

    def __next__(self) -> Any:
        raise StrategyError(
            "next() of a per-worker iterator was called on the chief, which has no per-worker data: pass the iterator "
            "to coordinator.schedule(fn, args=(iterator,)), and call next() in fn."
        )


@final
class PerWorkerDataset:
    """The handle of a data set that each worker creates for itself; ``iter`` of it is a ``PerWorkerValues``."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._iterators = 0

    def __iter__(self) -> PerWorkerValues:
        self._iterators += 1
        return PerWorkerValues(self._number, self._iterators)


def _host(leaf: Any) -> Any:
    adapter = adapter_of(leaf)
    return leaf if isinstance(adapter, NumpyArrays) else adapter.to_host(leaf)
