"""Asynchronous collectives, and the section in which one thread's collective runs: one at a time, in the order of
calls. If other ranks call them in another order, ``members.py`` makes a plan, and a thread gives its section up::

    queue's thread                               main thread
    exclusive()
      take_turn("a"): other ranks propose "b"    waits for the section
      the ranks make a plan ─── gives it up ───► exclusive()
                                                   take_turn("b"): it is next in the plan; data moves
      it is the turn of "a"; data moves ◄───────── leaves the section
"""

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from choros import durations
from choros.comm.request import JOINED, SHUTDOWN, Request, called_at, caller, is_served
from choros.errors import ConfigError
from choros.observe.progress import page

P = ParamSpec("P")
T = TypeVar("T")
#: The digests of all ranks' requests, and their values.
Gathered = tuple[list[int], list[int]]

#: The number of collectives whose order is remembered.
_REMEMBERED = 4096


class Work(Generic[T]):
    """A collective under way.

    >>> queue = WorkQueue()
    >>> queue.submit("", lambda: 2 + 2).wait()
    4
    >>> queue.close()
    """

    def __init__(self, future: Future[T], blocking: Callable[[Future[T]], AbstractContextManager[None]]) -> None:
        self._future = future
        self._blocking = blocking

    def wait(self, timeout: float | None = None) -> T:
        """Returns the collective's result or raises its error; after a ``TimeoutError`` the collective continues."""
        if self._future.done():
            return self._future.result()
        with self._blocking(self._future), page.exchange():
            return self._future.result(timeout)

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future.done()


@final
class Section(AbstractContextManager[None]):
    """A reentrant lock that its owner can give up for a while. ``mutex`` guards, for microseconds, what other threads
    change; ``in_unit``: all ranks settle the end (``Communicator.atomic``); once it ``has_turn``, what it exchanges
    is its own; ``version`` increases with every change that a thread may wait for.
    """

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.owner: int | None = None
        self.has_turn = False
        self.in_unit = False
        self.version = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self.mutex)
        self._waiting = 0
        self._depth = 0
        self._on_exit: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        self.owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.end()
            self.has_turn, self.owner = False, None
            if self._waiting:
                with self.mutex:
                    self.wake()
        self._lock.release()

    def on_exit(self, ended: Callable[[], None]) -> None:
        """Calls ``ended`` when the section is left, or when ``on_exit`` is called again in it."""
        if self._on_exit is not None:
            self.end()
        self._on_exit = ended

    def end(self) -> None:
        """Calls what ``on_exit`` was given, once."""
        ended, self._on_exit = self._on_exit, None
        if ended is not None:
            ended()

    def wait(self, seconds: float | None = None) -> None:
        """Waits for a change, at most ``seconds``; call it with the mutex."""
        self._waiting += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._waiting -= 1

    def wake(self) -> None:
        """Wakes those that wait for a change; call it with the mutex."""
        self.version += 1
        if self._waiting:
            self._changed.notify_all()

    def give_up(self, version: int, seconds: float | None = None) -> None:
        """Lets other threads enter, until something has changed since ``version`` or ``seconds`` have passed."""
        depth, kept = self._depth, (self.owner, self._on_exit, self.in_unit)
        self._depth, self.owner, self._on_exit, self.in_unit = 0, None, None, False
        with self.mutex:  # before another thread enters: it may change something and leave at once
            self._waiting += 1
        for _ in range(depth):
            self._lock.release()
        try:
            with self.mutex:
                if self.version == version:
                    self.wait(seconds)
        finally:
            for _ in range(depth):
                self._lock.acquire()
            with self.mutex:
                self._waiting -= 1
            self._depth, (self.owner, self._on_exit, self.in_unit) = depth, kept

    @contextmanager
    def nested(self) -> Iterator[None]:
        """A context for another collective, which has a turn of its own."""
        kept = self._on_exit, self.in_unit
        self._on_exit, self.in_unit = None, False
        try:
            yield
        finally:
            self.end()
            self.has_turn, (self._on_exit, self.in_unit) = False, kept


@dataclass(frozen=True, eq=False)
class _Queued:
    name: str
    collective: Callable[[], Any]
    location: str | None
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> Callable[[], None]:
        """Runs it; returns what makes its result, or its error, that of the future."""
        try:
            with called_at(self.location):
                return functools.partial(self.future.set_result, self.collective())
        except BaseException as error:  # noqa: BLE001  (Work.wait raises it)
            return functools.partial(self.future.set_exception, error)


@dataclass(frozen=True, eq=False)
class _Asker:
    """A thread that waits for its turn; a name of ``None`` takes any."""

    name: str | None
    thread: threading.Thread


class _StepOrder:
    """The order of collectives in the last step, remembered from when ranks first asked in different orders."""

    def __init__(self) -> None:
        #: By name, the collective that came after it.
        self._successors: dict[str, str] = {}
        self._first: str | None = None
        self._last = ""

    def note(self, name: str) -> None:
        """Notes the collective that begins."""
        if len(self._successors) >= _REMEMBERED:
            self._successors.clear()
            self._first = None
        if self._first is None:
            self._first = name
        else:
            self._successors[self._last] = name
        self._last = name

    def expected(self) -> str | None:
        """The name that came next the last time; after the last of them, the first."""
        return self._successors.get(self._last, self._first)


@final
class WorkQueue:
    """Runs the collectives of one communicator, one at a time; in the ``plan`` if ranks asked in different orders."""

    def __init__(self) -> None:
        self.plan: deque[str] = deque()
        self._planning = False
        self.section = Section()
        self._executor: ThreadPoolExecutor | None = None
        self._worker: int | None = None
        self._running: str | None = None
        self._queued: deque[_Queued] = deque()
        self._unfinished = 0
        self._names: set[str] = set()
        self._askers: list[_Asker] = []
        #: Threads that have called; a number may be that of another thread, once its own has ended.
        self._callers = weakref.WeakSet[threading.Thread]()
        self._noted = threading.local()
        #: Threads that wait for a collective, which may be done before they know it.
        self._blocked: dict[int, Future[Any]] = {}
        self._kept_waiting = 0
        self._last_news = 0.0
        self._order: _StepOrder | None = None

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def submit(self, name: str, collective: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Runs ``collective`` on the queue's thread, matched by ``name``, one at a time; ``""``: by order of calls."""
        queued = _Queued(name, lambda: collective(*args, **kwargs), caller())
        self._note_caller()
        with self.section.mutex:
            self._check_unused(name)
            if name:
                self._names.add(name)
            self._queued.append(queued)
            self._unfinished += 1
            self._note_news()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="choros-comm")
            self._executor.submit(self._run_next)
        return Work(queued.future, self._blocking)

    def exclusive(self) -> AbstractContextManager[None]:
        """The section, for the calling thread, after all submitted, unless other ranks ask for something else first."""
        if not hasattr(self._noted, "is_caller"):
            self._note_caller()
        if self._unfinished and self.section.owner != threading.get_ident():
            with self.section.mutex:
                self._kept_waiting += 1
                self.section.wake()
                try:
                    while self._unfinished and not (self._planning or self.plan):
                        self.section.wait()
                finally:
                    self._kept_waiting -= 1
        return self.section

    def close(self) -> None:
        """Waits for what was submitted and ends the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None

    @property
    def in_background(self) -> bool:
        """Whether the calling thread is the queue's."""
        return threading.get_ident() == self._worker

    # ── turns ────────────────────────────────────────────────────────────────────────────────────

    def take_turn(
        self,
        name: str | None,
        request: Request,
        header: NDArray[np.int64],
        exchange: Callable[[Request, NDArray[np.int64]], Gathered],
        make_plan: Callable[[Request], None],
    ) -> Gathered:
        """Waits in the section until all ranks begin ``name`` (``None``: any); returns what they ``exchange``. If their
        requests differ, ``make_plan`` fills ``plan`` with the others.
        """
        section = self.section
        if section.has_turn:
            return exchange(request, header)
        if self._running is not None and self.in_background:
            name = self._running
        elif name and (self._names or self._askers):
            with section.mutex:
                self._check_unused(name)
        asker: _Asker | None = None
        differ = False
        try:
            while True:
                if asker is None and (differ or self.plan or self._askers):
                    asker = _Asker(name, threading.current_thread())
                    with section.mutex:
                        self._askers.append(asker)
                        self._note_news()
                version = section.version
                if self.plan and asker is not None:
                    if self._is_next(asker):
                        name = self.plan.popleft()
                        gathered = exchange(request, header)
                        break
                    if not self.in_background or not self._run_planned():
                        section.give_up(version)
                elif self._planning or self._is_behind_queue(name):
                    section.give_up(version)
                elif differ:
                    differ = False
                    with self._planned():
                        make_plan(request)
                else:
                    gathered = digests, _ = exchange(request, header)
                    if digests.count(request.digest) == len(digests) or _is_settled(digests):
                        break
                    differ = True
        finally:
            if asker is not None:
                with section.mutex:
                    self._askers.remove(asker)
        section.has_turn = True
        if name is not None and self._order is not None:
            self._order.note(name)
        return gathered

    def asked_for(self) -> tuple[list[str], bool, bool]:
        """What this rank waits for, ``""`` the first without a name; whether it takes any, as it has joined; whether
        it is complete: it asks no more before one is done.
        """
        with self.section.mutex:
            names = [asker.name for asker in self._askers if asker.name is not None]
            names += [queued.name for queued in self._queued]
            has_joined = any(asker.name is None for asker in self._askers)
            return [*dict.fromkeys(names)], has_joined, self._is_complete()

    def abandon_plan(self) -> None:
        """Forgets the plan: this rank cannot communicate any more."""
        with self.section.mutex:
            self.plan.clear()
            self.section.wake()

    @contextmanager
    def _planned(self) -> Iterator[None]:
        """A context in which the plan is made: the other threads may enter their sections to say what they ask for."""
        self._planning = True
        with self.section.mutex:
            self.section.wake()
        try:
            yield
        finally:
            self._planning = False
            with self.section.mutex:
                self.section.wake()
        self._order = self._order or _StepOrder()

    def _is_next(self, asker: _Asker) -> bool:
        """Whether the plan continues with the collective of ``asker``: of those without a name, the first asked for."""
        name = self.plan[0]
        if self._is_behind_queue(name):
            return False
        asking = [each for each in self._askers if each.name == name]
        if self.in_background:  # the others come after it, also if they have asked before
            asking = [each for each in asking if each.thread is asker.thread]
        return asker is asking[0] if asking else asker.name is None

    def _is_behind_queue(self, name: str | None) -> bool:
        """Whether a collective of this name (``None``: any) was submitted that has not had its turn, and the calling
        thread's is later: it may have entered the section while a plan was made, and asked before the queue's could.
        """
        if not self._unfinished or self.in_background:
            return False
        own = any(asker.name == name and asker.thread.ident == self._worker for asker in self._askers)
        return name is None or own or self._find(name) is not None

    def _is_complete(self) -> bool:
        """Whether every thread that calls collectives waits for one. One that Python has not started, such as
        TensorFlow's, calls while its thread waits. One that has never called may do so, and others of a pool that
        asks by name, as in a session of TensorFlow 1, whose graph has no order: they get some seconds.
        """
        quiet = time.monotonic() - self._last_news > durations.NEWCOMER
        waiting = {asker.thread.ident for asker in self._askers} | {self._worker}
        waiting |= {ident for ident, future in self._blocked.items() if not future.done()}
        free = [thread for thread in threading.enumerate() if thread.ident not in waiting and not _is_foreign(thread)]
        callers = [thread for thread in free if thread in self._callers]
        if len(callers) > sum(_is_foreign(asker.thread) for asker in self._askers):
            return False
        pooled = any(asker.name and _is_foreign(asker.thread) for asker in self._askers)
        newcomers = [thread for thread in free if thread not in callers and _may_call(thread)]
        return not (pooled or newcomers) or quiet

    # ── the queue's thread ───────────────────────────────────────────────────────────────────────

    def _run_next(self) -> None:
        """Runs a queued collective, unless all of them have had their turns."""
        self._worker = threading.get_ident()
        patience = time.monotonic() + durations.PATIENCE
        section = self.section
        with section:
            while self._queued:
                version = section.version
                if self.plan or self._planning:
                    if not self._run_planned():
                        section.give_up(version)
                    continue
                expected = None if self._order is None else self._order.expected()
                left = patience - time.monotonic()
                ready = expected is None or self._find(expected) is not None
                if ready or self._blocked or self._kept_waiting or left <= 0:
                    self._run(self._find(expected) or self._queued[0])
                    return
                section.give_up(version, left)

    def _run_planned(self) -> bool:
        queued = self._find(self.plan[0]) if self.plan else None
        if queued is not None:
            self._run(queued)
        return queued is not None

    def _run(self, queued: _Queued) -> None:
        with self.section.mutex:
            self._queued.remove(queued)
        outer, self._running = self._running, queued.name
        with self.section.nested():
            show_result = queued.run()
        self._running = outer
        with self.section.mutex:
            self._names.discard(queued.name)
        show_result()
        with self.section.mutex:
            self._unfinished -= 1
            self.section.wake()

    def _find(self, name: str | None) -> _Queued | None:
        with self.section.mutex:
            return next((each for each in self._queued if each.name == name), None)

    # ── threads ──────────────────────────────────────────────────────────────────────────────────

    def _note_caller(self) -> None:
        thread = threading.current_thread()
        if not isinstance(thread, threading._DummyThread) and thread.ident != self._worker:
            self._callers.add(thread)
            self._noted.is_caller = True

    def _note_news(self) -> None:
        self._last_news = time.monotonic()
        self.section.wake()

    @contextmanager
    def _blocking(self, future: Future[Any]) -> Iterator[None]:
        """A context in which the calling thread waits for a collective that is under way."""
        ident = threading.get_ident()
        with self.section.mutex:
            self._blocked[ident] = future
            self.section.wake()
        try:
            yield
        finally:
            with self.section.mutex:
                self._blocked.pop(ident, None)  # a signal's handler may have waited, too

    def _check_unused(self, name: str) -> None:
        if name and (name in self._names or any(asker.name == name for asker in self._askers)):
            raise ConfigError(
                f"a collective with the name {name!r} is already under way on this rank: wait for it, or give this one "
                "another name."
            )


def _is_settled(digests: list[int]) -> bool:
    """Whether different requests settle a turn: a rank ends or is to be served, or all not joined make the same."""
    if SHUTDOWN.digest in digests or any(map(is_served, digests)):
        return True
    return JOINED.digest in digests and len({*digests}) == 2


def _is_foreign(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)


def _may_call(thread: threading.Thread) -> bool:
    """Whether ``thread``, which has never called a collective, may be about to."""
    own = thread is threading.main_thread() or thread.name.startswith("choros")
    return not (own or thread.daemon)
