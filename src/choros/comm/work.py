"""Asynchronous collectives, which run in the order of their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar, final

__all__ = ["Work", "WorkQueue"]

P = ParamSpec("P")
T = TypeVar("T")


class Work(Generic[T]):
    """A collective under way.

    Example:
        >>> queue = WorkQueue()
        >>> queue.submit(lambda: 2 + 2).wait()
        4
        >>> queue.close()
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the collective has ended, and returns its result or raises its error.

        Args:
            timeout: at most this many seconds; ``None`` waits without a limit.

        Raises:
            TimeoutError: the collective has not ended by then; it continues.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future.done()


@final
class _Exclusive(AbstractContextManager[None]):
    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._depth = 0
        self.on_exit: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self.on_exit is not None:
            self.end()
        self._lock.release()

    def end(self) -> None:
        """Calls ``on_exit``, once."""
        ended, self.on_exit = self.on_exit, None
        if ended is not None:
            ended()


class WorkQueue:
    """Runs one collective at a time, in the order of the calls.

    Ranks must issue collectives in one order; a single queue for all communicators of a process keeps the
    order in which the process asked, whether it waits for each one or not.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.RLock()
        self._exclusive = _Exclusive(self._lock)
        self._last: Future[Any] | None = None

    def submit(self, collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Runs ``collective`` after all submitted before it, on the queue's own thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="choros-comm")

        def run() -> T:
            with self._exclusive:
                return collective(*args, **kwargs)

        future = self._executor.submit(run)
        self._last = future
        return Work(future)

    def exclusive(self) -> AbstractContextManager[None]:
        """The lock, for the calling thread: what was submitted before has ended, nothing else runs meanwhile.

        A blocking collective runs on the caller's own thread, which saves the hand-over.
        """
        last = self._last
        if last is not None and not self._on_own_thread():
            # Its error, if any, is raised to the caller that waits for that work.
            last.exception()
        return self._exclusive

    def on_exit(self, ended: Callable[[], None]) -> None:
        """Calls ``ended`` when the section that the caller is in is left, or when ``on_exit`` is called again in it."""
        self._exclusive.end()
        self._exclusive.on_exit = ended

    def _on_own_thread(self) -> bool:
        return threading.current_thread().name.startswith("choros-comm")

    def close(self) -> None:
        """Waits for what was submitted and ends the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
            self._last = None
