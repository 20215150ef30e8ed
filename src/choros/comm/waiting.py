"""Waiting by polling: at first without a pause, then at increasing intervals.

::

    waited   0 ─────────── 20 µs ──────────────── 200 µs ───────────── 10 ms ────────── 1 s ────────── …
    between    nothing        yield the core         sleep a tenth of     sleep 1 ms       sleep 1 ms;
    two polls                                        the time waited                       report the wait

The spin at the start serves ranks that arrive together: they proceed as fast as in a blocking call. It ends early if
other processes use the core, which is detected by how long a yield takes. A sleep delays the rank by at most a tenth
of the time it has waited, and lets the other threads of this process run. Polling from Python lets Ctrl-C and the
handlers of signals run in between, and lets the engine notice that a peer has died. A rank that waits long reports it:
chorosrun knows which ranks have ended, and stops a job in which one waits for another that will never come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from choros.comm.request import caller
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.progress import page

__all__ = ["WAITING", "LongWait", "Reporter", "Schedule", "wait_until"]

#: This number of polls takes about 20 µs.
_TIGHT_POLLS = 64
#: A yield takes less than a microsecond unless something else has run meanwhile.
_LONG_YIELD_SECONDS = 50e-6


@dataclass(frozen=True)
class Schedule:
    """When a rank that waits polls again.

    Attributes:
        spin_seconds: how long it polls without sleeping.
        shortest_sleep: seconds, the first sleep at least.
        longest_sleep: seconds, every sleep at most.
        share: a sleep's share of the time waited before it.
        report_seconds: a wait is reported after this time, then after half as much again, at least every
            ``longest_silence`` seconds.
        longest_silence: see above.
    """

    spin_seconds: float = 200e-6
    shortest_sleep: float = 20e-6
    longest_sleep: float = 1e-3
    share: float = 0.1
    report_seconds: float = 1.0
    longest_silence: float = 10.0

    def sleep_after(self, waited: float) -> float:
        """How many seconds to sleep once the spin is over and ``waited`` seconds have passed.

        Example:
            >>> [Schedule().sleep_after(waited) for waited in (0.0, 0.005, 10.0)]
            [2e-05, 0.0005, 0.001]
        """
        return min(self.longest_sleep, max(self.shortest_sleep, waited * self.share))

    def report_after(self, waited: float) -> float:
        """How many seconds a rank has waited when it reports again that it waits."""
        return min(1.5 * waited, waited + self.longest_silence)


#: The schedule of all engines.
WAITING = Schedule()


@final
class LongWait:
    """A wait of this rank for others, reported by the events ``WAITING`` and ``WAITED``.

    Args:
        what: in which call.
        ranks: the ranks that must call it.
    """

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        self._what = what
        self._ranks = tuple(ranks)
        self._at = caller() or ""

    def report(self, waited: float) -> None:
        """Reports that this rank has waited for ``waited`` seconds."""
        events.emit(Kind.WAITING, self._what, process_set=self._ranks, at=self._at, seconds=round(waited, 3))

    def end(self) -> None:
        """Reports that it waits no longer."""
        events.emit(Kind.WAITED, self._what)


@final
class Reporter:
    """Reports a wait, which begins now, when it becomes long.

    Args:
        describe: returns the wait; ``None``: it is not reported.
        schedule: when it is reported.
        transfer: the seconds that it lasts if all ranks are there, because messages take time: no wait for others.
    """

    def __init__(
        self, describe: Callable[[], LongWait] | None, schedule: Schedule = WAITING, transfer: float = 0.0
    ) -> None:
        self._describe = describe
        self._transfer = transfer
        self._schedule = schedule
        self._begin = time.perf_counter()
        self._due = schedule.report_seconds
        self._wait: LongWait | None = None

    def __enter__(self) -> Reporter:
        return self

    def check(self) -> float:
        """Reports the wait if it is time to; returns how many seconds it has lasted."""
        waited = time.perf_counter() - self._begin
        if waited >= self._due and self._describe is not None:
            self._wait = self._wait or self._describe()
            self._wait.report(waited)
            self._due = self._schedule.report_after(waited)
        return waited

    def __exit__(self, *_: object) -> None:
        page.note_wait(max(0.0, time.perf_counter() - self._begin - self._transfer))
        if self._wait is not None:
            self._wait.end()


def wait_until(
    poll: Callable[[], bool], schedule: Schedule = WAITING, describe: Callable[[], LongWait] | None = None
) -> bool:
    """Returns as soon as ``poll`` has returned true.

    Args:
        poll: cheap; its errors are raised here.
        schedule: when it is called again.
        describe: returns the wait, to report it; ``None``: it is not reported.

    Returns:
        Whether other processes were seen to use this core. It stays unknown, and false, if the wait was short.

    Example:
        >>> polls = iter([False, False, True])
        >>> wait_until(lambda: next(polls))
        False
    """
    for _ in range(_TIGHT_POLLS):
        if poll():
            return False
    core_is_shared = False
    begin = now = time.perf_counter()
    while now - begin < schedule.spin_seconds and not core_is_shared:
        before = now
        os.sched_yield()
        now = time.perf_counter()
        core_is_shared = now - before > _LONG_YIELD_SECONDS
        if poll():
            return core_is_shared
    with Reporter(describe, schedule) as reporter:
        while not poll():
            time.sleep(schedule.sleep_after(reporter.check()))
    return core_is_shared
