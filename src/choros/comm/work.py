"""Asynchronous collectives, and the section in which one thread's collective runs.

Collectives run one at a time, in the order of their calls. If other ranks call them in another order, ``matching.py``
makes a plan, and a thread whose turn has not come gives its section up::

    queue's thread                               main thread
    exclusive()
      take_turn("a"): other ranks propose "b"    waits for the section
      the ranks make a plan ─── gives it up ───► exclusive()
                                                   take_turn("b"): it is next in the plan; data moves
      it is the turn of "a"; data moves ◄───────── leaves the section
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, TypeVarTuple, final

from choros.comm.matching import Offer
from choros.comm.request import called_at, caller
from choros.errors import ConfigError

__all__ = ["Work", "WorkQueue"]

P = ParamSpec("P")
T = TypeVar("T")
Table = TypeVar("Table")
Args = TypeVarTuple("Args")

#: How long the queue's thread waits for the collective that came next in the last step, before it begins another one.
_PATIENCE_SECONDS = 1e-3
#: How long a thread that has never called a collective has to call its first one, before it counts as not taking part.
_NEWCOMER_SECONDS = 10.0
#: The number of collectives whose order is remembered.
_REMEMBERED = 4096


class Work(Generic[T]):
    """A collective under way.

    Example:
        >>> queue = WorkQueue()
        >>> queue.submit(lambda: 2 + 2).wait()
        4
        >>> queue.close()
    """

    def __init__(self, future: Future[T], blocking: Callable[[], AbstractContextManager[None]]) -> None:
        self._future = future
        self._blocking = blocking

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the collective has ended, and returns its result or raises its error.

        Args:
            timeout: at most this many seconds; ``None`` waits without a limit.

        Raises:
            TimeoutError: the collective has not ended by then; it continues.
        """
        if self._future.done():
            return self._future.result()
        with self._blocking():
            return self._future.result(timeout)

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future.done()


@dataclass(frozen=True, eq=False)
class _Queued:
    """A collective that has not begun."""

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


@final
class _Section(AbstractContextManager[None]):
    """A reentrant lock that the thread which has it, its owner, can give up for a while.

    Attributes:
        mutex: guards what threads change that are not in the section; held for microseconds only.
        owner: the number of the thread that is in the section.
        in_unit: whether the owner is in a collective whose end all ranks settle: see ``Communicator.atomic``.
        has_turn: whether the collective in it has had its turn: what it exchanges from now on is its own.
        version: increases with every change that a thread may wait for.
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
            if self._on_exit is not None:
                self.end()
            self.has_turn, self.owner = False, None
            if self._waiting:
                with self.mutex:
                    self.wake()
        self._lock.release()

    def on_exit(self, ended: Callable[[], None]) -> None:
        """Calls ``ended`` when the section is left, or when ``on_exit`` is called again in it."""
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

    @contextmanager
    def unit(self) -> Iterator[None]:
        """A context for a collective whose end all ranks settle."""
        self.in_unit = True
        try:
            yield
        finally:
            self.in_unit = False


@final
class WorkQueue:
    """Runs the collectives of one communicator, one at a time.

    Attributes:
        plan: the names of the next collectives, as all ranks have agreed, if they asked in different orders.
    """

    def __init__(self) -> None:
        self.plan: deque[str] = deque()
        self._planning = False
        self._section = _Section()
        self._executor: ThreadPoolExecutor | None = None
        self._worker: int | None = None
        self._running: str | None = None
        self._queued: deque[_Queued] = deque()
        self._unfinished = 0
        self._names: set[str] = set()
        self._askers: list[_Asker] = []
        self._callers: dict[int, threading.Thread] = {}
        self._blocked: set[int] = set()
        self._kept_waiting = 0
        self._last_news = 0.0
        #: By name, the collective that came after it; ``None`` as long as ranks ask in the same order.
        self._successors: dict[str, str] | None = None
        self._first: str | None = None
        self._last = ""

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def submit(self, collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """``submit_named`` without a name."""
        return self.submit_named("", collective, *args, **kwargs)

    def submit_named(self, name: str, collective: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Runs ``collective`` on the queue's own thread.

        Args:
            name: its name, by which ranks match it; ``""``: they match it by the order of such calls.
            collective: the function.
            *args: its arguments.
            **kwargs: likewise.

        Raises:
            ConfigError: a collective of this name is under way.
        """
        queued = _Queued(name, lambda: collective(*args, **kwargs), caller())
        self._note_caller()
        with self._section.mutex:
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
        """The section, for the calling thread: nothing else runs meanwhile.

        What was submitted before has ended, unless it waits because other ranks ask for something else first. A
        blocking collective runs on the caller's own thread, which saves the hand-over.
        """
        if threading.get_ident() not in self._callers:
            self._note_caller()
        if self._unfinished and self._section.owner != threading.get_ident():
            with self._section.mutex:
                self._kept_waiting += 1
                self._section.wake()
                try:
                    while self._unfinished and not (self._planning or self.plan):
                        self._section.wait()
                finally:
                    self._kept_waiting -= 1
        return self._section

    @property
    def in_unit(self) -> bool:
        """Whether the caller, who is in the section, is in a ``unit``."""
        return self._section.in_unit

    def unit(self) -> AbstractContextManager[None]:
        """A context for a collective whose end all ranks settle; call it in the section."""
        return self._section.unit()

    def on_exit(self, ended: Callable[[], None]) -> None:
        """Calls ``ended`` when the section that the caller is in is left, or when ``on_exit`` is called again in it."""
        self._section.on_exit(ended)

    def close(self) -> None:
        """Waits for what was submitted and ends the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None

    # ── turns ────────────────────────────────────────────────────────────────────────────────────

    def take_turn(
        self,
        name: str | None,
        propose: Callable[[*Args], tuple[Table, bool]],
        make_plan: Callable[[*Args], None],
        *args: *Args,
    ) -> Table:
        """Waits until all ranks begin the collective ``name``; call it in the section.

        Args:
            name: its name; ``None``: it takes part in any.
            propose: sends the control message; returns what all ranks proposed, and whether that settles the turn.
            make_plan: fills ``plan``, together with the other ranks; meanwhile it calls ``pause``.
            *args: the arguments of both.

        Returns:
            What all ranks proposed.

        Raises:
            ConfigError: a collective of this name is under way.
        """
        section = self._section
        if section.has_turn:
            return propose(*args)[0]
        if self._running is not None and threading.get_ident() == self._worker:
            name = self._running
        elif name and (self._names or self._askers):
            with section.mutex:
                self._check_unused(name)
        differ = False
        if not (self.plan or self._askers):
            table, settled = propose(*args)
            if settled:
                self._begin(name)
                return table
            differ = True
        asker = _Asker(name, threading.current_thread())
        with section.mutex:
            self._askers.append(asker)
            self._note_news()
        try:
            while True:
                version = section.version
                if self.plan:
                    if self._is_next(asker):
                        self._begin(self.plan.popleft())
                        return propose(*args)[0]
                    if threading.get_ident() != self._worker or not self._run_planned():
                        section.give_up(version)
                elif self._planning:
                    section.give_up(version)
                elif differ:
                    differ = False
                    with self._planned():
                        make_plan(*args)
                else:
                    table, settled = propose(*args)
                    if settled:
                        self._begin(name)
                        return table
                    differ = True
        finally:
            with section.mutex:
                self._askers.remove(asker)

    def offer(self) -> Offer:
        """What this rank waits for."""
        with self._section.mutex:
            names = [asker.name for asker in self._askers if asker.name is not None]
            names += [queued.name for queued in self._queued]
            joined = any(asker.name is None for asker in self._askers)
            return Offer(tuple(dict.fromkeys(names)), self._is_complete(), joined)

    def pause(self, seconds: float) -> None:
        """Lets other threads ask for their collectives, for ``seconds`` or until one has."""
        self._section.give_up(self._section.version, seconds)

    def end_turn(self) -> None:
        """Lets the section go on with another collective, which has a turn of its own."""
        self._section.end()
        self._section.has_turn = False

    def abandon_plan(self) -> None:
        """Forgets the plan: this rank cannot communicate any more."""
        with self._section.mutex:
            self.plan.clear()
            self._section.wake()

    @contextmanager
    def _planned(self) -> Iterator[None]:
        """A context in which the plan is made: the other threads may enter their sections to say what they ask for."""
        self._planning = True
        with self._section.mutex:
            self._section.wake()
        try:
            yield
        finally:
            self._planning = False
            with self._section.mutex:
                self._section.wake()
        if self._successors is None:
            self._successors = {}

    def _is_next(self, asker: _Asker) -> bool:
        """Whether the plan continues with the collective of ``asker``: of those without a name, the first asked for."""
        name = self.plan[0]
        first = next((each for each in self._askers if each.name == name), None)
        if first is None:
            return asker.name is None and self._find(name) is None
        return asker is first and (asker.thread.ident == self._worker or self._find(name) is None)

    def _begin(self, name: str | None) -> None:
        self._section.has_turn = True
        if self._successors is not None and name is not None:
            if len(self._successors) >= _REMEMBERED:
                self._successors.clear()
                self._first = None
            if self._first is None:
                self._first = name
            else:
                self._successors[self._last] = name
            self._last = name

    def _is_complete(self) -> bool:
        """Whether every thread that calls collectives waits for one.

        A thread that Python has not started, such as one of TensorFlow's, calls one while the thread that it computes
        for waits. A thread that has never called one may still do so: it gets some seconds. So do others of a pool, one
        of which asks by name, as in a session of TensorFlow 1, whose graph has no order.
        """
        quiet = time.monotonic() - self._last_news > _NEWCOMER_SECONDS
        waiting = {asker.thread.ident for asker in self._askers} | self._blocked | {self._worker}
        free = [thread for thread in threading.enumerate() if thread.ident not in waiting and not _is_foreign(thread)]
        callers = [thread for thread in free if thread.ident in self._callers]
        if len(callers) > sum(_is_foreign(asker.thread) for asker in self._askers):
            return False
        pooled = any(asker.name and _is_foreign(asker.thread) for asker in self._askers)
        newcomers = [thread for thread in free if thread not in callers and _may_call(thread)]
        return not (pooled or newcomers) or quiet

    # ── the queue's thread ───────────────────────────────────────────────────────────────────────

    def _run_next(self) -> None:
        """Runs a queued collective, unless all of them have had their turns."""
        self._worker = threading.get_ident()
        patience = time.monotonic() + _PATIENCE_SECONDS
        section = self._section
        with section:
            while self._queued:
                version = section.version
                if self.plan or self._planning:
                    if not self._run_planned():
                        section.give_up(version)
                    continue
                expected = self._expected()
                left = patience - time.monotonic()
                ready = expected is None or self._find(expected) is not None
                if ready or self._blocked or self._kept_waiting or left <= 0:
                    self._run(self._find(expected) or self._queued[0])
                    return
                section.give_up(version, left)

    def _expected(self) -> str | None:
        """The name that came next the last time; after the last of them, the first."""
        return None if self._successors is None else self._successors.get(self._last, self._first)

    def _run_planned(self) -> bool:
        """Runs the next collective of the plan if it is queued, and returns whether it was."""
        queued = self._find(self.plan[0]) if self.plan else None
        if queued is not None:
            self._run(queued)
        return queued is not None

    def _run(self, queued: _Queued) -> None:
        with self._section.mutex:
            self._queued.remove(queued)
        outer, self._running = self._running, queued.name
        with self._section.nested():
            show_result = queued.run()
        self._running = outer
        with self._section.mutex:
            self._names.discard(queued.name)
        show_result()
        with self._section.mutex:
            self._unfinished -= 1
            self._section.wake()

    def _find(self, name: str | None) -> _Queued | None:
        with self._section.mutex:
            return next((each for each in self._queued if each.name == name), None)

    # ── threads ──────────────────────────────────────────────────────────────────────────────────

    def _note_caller(self) -> None:
        ident = threading.get_ident()
        if ident not in self._callers and ident != self._worker:
            thread = threading.current_thread()
            if not _is_foreign(thread):
                self._callers[ident] = thread

    def _note_news(self) -> None:
        self._last_news = time.monotonic()
        self._section.wake()

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """A context in which the calling thread waits for a collective that is under way."""
        ident = threading.get_ident()
        with self._section.mutex:
            self._blocked.add(ident)
            self._section.wake()
        try:
            yield
        finally:
            with self._section.mutex:
                self._blocked.discard(ident)

    def _check_unused(self, name: str) -> None:
        if name and (name in self._names or any(asker.name == name for asker in self._askers)):
            raise ConfigError(
                f"a collective with the name {name!r} is already under way on this rank: wait for it, or give this one "
                "another name."
            )


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether Python has not started ``thread``."""
    return isinstance(thread, threading._DummyThread)


def _may_call(thread: threading.Thread) -> bool:
    """Whether ``thread``, which has never called a collective, may be about to."""
    own = thread is threading.main_thread() or thread.name.startswith("choros")
    return not (own or thread.daemon)
