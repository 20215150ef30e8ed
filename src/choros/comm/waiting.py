"""Waiting by polling: at first without a pause, then at increasing intervals.

::

    waited   0 ─────────── 20 µs ──────────────── 200 µs ───────────── 10 ms ────────── …
    between    nothing        yield the core         sleep a tenth of     sleep 1 ms
    two polls                                        the time waited

The spin at the start serves ranks that arrive together: they proceed as fast as in a blocking call. It ends early if
other processes use the core, which is detected by how long a yield takes. A sleep delays the rank by at most a tenth
of the time it has waited, and lets the other threads of this process run. Polling from Python lets Ctrl-C and the
handlers of signals run in between, and lets the engine notice that a peer has died.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["WAITING", "Schedule", "wait_until"]

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
    """

    spin_seconds: float = 200e-6
    shortest_sleep: float = 20e-6
    longest_sleep: float = 1e-3
    share: float = 0.1

    def sleep_after(self, waited: float) -> float:
        """How many seconds to sleep once the spin is over and ``waited`` seconds have passed.

        Example:
            >>> [Schedule().sleep_after(waited) for waited in (0.0, 0.005, 10.0)]
            [2e-05, 0.0005, 0.001]
        """
        return min(self.longest_sleep, max(self.shortest_sleep, waited * self.share))


#: The schedule of all engines.
WAITING = Schedule()


def wait_until(poll: Callable[[], bool], schedule: Schedule = WAITING) -> None:
    """Returns as soon as ``poll`` has returned true.

    Args:
        poll: cheap; its errors are raised here.
        schedule: when it is called again.

    Example:
        >>> polls = iter([False, False, True])
        >>> wait_until(lambda: next(polls))
    """
    for _ in range(_TIGHT_POLLS):
        if poll():
            return
    begin = now = time.perf_counter()
    while now - begin < schedule.spin_seconds:
        os.sched_yield()
        if poll():
            return
        before, now = now, time.perf_counter()
        if now - before > _LONG_YIELD_SECONDS:
            break
    while not poll():
        time.sleep(schedule.sleep_after(time.perf_counter() - begin))
