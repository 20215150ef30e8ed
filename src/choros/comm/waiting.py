"""Waiting by polling: first a spin, for ranks that arrive together, then sleeps of a tenth of the time waited. The
spin ends early if yields are slow, as others use the core. Ctrl-C and signals are handled between polls, and lost
peers noticed; chorosrun hears of long waits, and stops a job that waits for a rank that has ended::

    waited   0 ─────────── 20 µs ──────────────── 200 µs ───────────── 10 ms ────────── 1 s ────────── …
    between    nothing        yield the core         sleep a tenth of     sleep 1 ms       sleep 1 ms;
    two polls                                        the time waited                       report the wait
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import final

from choros import durations
from choros.comm.request import caller
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.progress import page

#: What a rank waits in, and for which ranks, as the launcher numbers them: all must call it.
Awaited = tuple[str, Sequence[int]]

#: This number of polls takes about 20 µs.
_TIGHT_POLLS = 64
#: Polls that have failed are kept, with what they hold: MPI may still write into the buffers of a request.
_failed: list[Callable[[], bool]] = []
#: Ranks that arrive last do not wait, and so have no evidence: it is kept for this number of agreements.
_AGREEMENTS = 100


def sleep_after(waited: float, longest: float = 1e-3) -> float:
    """How many seconds to sleep once the spin is over and ``waited`` seconds have passed.

    >>> [sleep_after(waited) for waited in (0.0, 0.005, 10.0)]
    [2e-05, 0.0005, 0.001]
    """
    return min(longest, max(durations.POLL, 0.1 * waited))


def _report(what: str, ranks: Sequence[int], at: str, waited: float) -> None:
    events.emit(Kind.WAITING, what, process_set=tuple(ranks), at=at, seconds=round(waited, 3))


@contextmanager
def reported(what: str, ranks: Sequence[int]) -> Iterator[None]:
    """A context in which this rank waits for ``ranks``, which must call ``what``: it is reported at once."""
    _report(what, ranks, caller() or "", 0.0)
    try:
        yield
    finally:
        events.emit(Kind.WAITED, what)


@final
class Reporter:
    """Reports a wait, which begins now, when it becomes long; the ``transfer`` of messages is no wait for others."""

    def __init__(self, describe: Callable[[], Awaited] | None, transfer: float = 0.0) -> None:
        self._describe = describe
        self._transfer = transfer
        self._begin = time.perf_counter()
        self._due = float(durations.FIRST_REPORT)
        self._reported: tuple[str, Sequence[int], str] | None = None

    def __enter__(self) -> Reporter:
        return self

    def check(self) -> float:
        """Reports the wait if it is time to; returns how many seconds it has lasted."""
        waited = time.perf_counter() - self._begin
        if waited >= self._due and self._describe is not None:
            self._reported = self._reported or (*self._describe(), caller() or "")
            _report(*self._reported, waited)
            self._due = min(1.5 * waited, waited + durations.NEXT_REPORT)
        return waited

    def __exit__(self, *_: object) -> None:
        page.waited += max(0.0, time.perf_counter() - self._begin - self._transfer)
        if self._reported is not None:
            events.emit(Kind.WAITED, self._reported[0])


def wait_until(poll: Callable[[], bool], describe: Callable[[], Awaited] | None = None) -> bool:
    """Waits for ``poll``, which is cheap; returns whether others were seen to use the core (not in short waits).

    >>> polls = iter([False, False, True])
    >>> wait_until(lambda: next(polls))
    False
    """
    try:
        for _ in range(_TIGHT_POLLS):
            if poll():
                return False
        core_is_shared = False
        begin = now = time.perf_counter()
        while now - begin < durations.SPIN and not core_is_shared:
            before = now
            os.sched_yield()
            now = time.perf_counter()
            core_is_shared = now - before > durations.SLEEPY
            if poll():
                return core_is_shared
        with Reporter(describe) as reporter:
            while not poll():
                time.sleep(sleep_after(reporter.check()))
        return core_is_shared
    except BaseException:
        _failed.append(poll)
        raise


@cache
def idle_yield() -> IdleYield:
    """The switch of this process; MPI must have been initialised."""
    return IdleYield(open_mpi_switch())


@final
class IdleYield:
    """Switches whether this process yields its core in blocking calls of Open MPI. That costs a small allreduce 10 µs,
    and saves milliseconds where others use the core, as long yields show::

        agree: no long yield ─► agree: a long yield ─► yield on ─► 100 agreements without a long yield ─► yield off

    >>> calls = []
    >>> idle = IdleYield(calls.append)
    >>> idle.note(core_is_shared=True)
    >>> for _ in range(100):
    ...     idle.note(core_is_shared=False)
    >>> calls
    [True, False]
    """

    def __init__(self, switch: Callable[[bool], object] | None) -> None:
        """``switch`` turns yielding on and off; ``None``: it cannot be switched."""
        self._switch = switch
        self._agreements = 0

    def note(self, *, core_is_shared: bool) -> None:
        """Notes after an agreement whether another process has used this rank's core meanwhile."""
        if core_is_shared:
            if not self._agreements and self._switch:
                self._switch(True)
            self._agreements = _AGREEMENTS
        elif self._agreements:
            self._agreements -= 1
            if not self._agreements and self._switch:
                self._switch(False)


def open_mpi_switch() -> Callable[[bool], object] | None:
    """The switch of Open MPI, if MPI is initialised; ``None`` for others, without ``/proc``, and if already chosen."""
    maps = Path("/proc/self/maps")
    found = re.search(r"/.*/libopen-pal\.so\S*", maps.read_text()) if maps.exists() else None
    if found is None:
        return None
    library = ctypes.CDLL(found[0])
    try:
        switch = library.opal_progress_set_yield_when_idle
        if ctypes.c_bool.in_dll(library, "opal_progress_yield_when_idle"):
            return None
    except (AttributeError, ValueError):  # a version without them
        return None
    switch.argtypes, switch.restype = [ctypes.c_bool], ctypes.c_bool
    return switch
