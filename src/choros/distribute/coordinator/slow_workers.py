"""Slow workers: those on which a function takes longer than on the others. Workers do not wait for each other, but each
update of a slow one is based on older variables. Pure.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import final

__all__ = ["Runs", "WorkerTimes"]

#: The runs of a function on a worker, without the first one, which compiles it.
_FEWEST_RUNS = 10
_SLOW = 1.5


@dataclass(frozen=True)
class Runs:
    """The runs of one function on one worker.

    Attributes:
        number: their number.
        seconds: the time that they took.
        waiting: the part of it in which the worker waited for parameter servers.
    """

    number: int = 0
    seconds: float = 0.0
    waiting: float = 0.0

    @property
    def mean(self) -> float:
        """Seconds of a run."""
        return self.seconds / max(1, self.number)


@final
class WorkerTimes:
    """Compares the workers of a job.

    Example:
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
        self._runs: dict[str, dict[str, Runs]] = {}
        self._shown: set[str] = set()

    def note(self, worker: str, function: str, seconds: float, waiting: float) -> None:
        """Notes a run."""
        of_function = self._runs.setdefault(function, {})
        before = of_function.get(worker)
        if before is None:
            of_function[worker] = Runs()
        else:
            of_function[worker] = Runs(before.number + 1, before.seconds + seconds, before.waiting + waiting)

    def sentence(self) -> str:
        """Returns a sentence about a worker that is slow, and was not named before; empty if there is none."""
        for function, of_function in self._runs.items():
            runs = {worker: each for worker, each in of_function.items() if each.number >= _FEWEST_RUNS}
            for worker, own in runs.items():
                others = [each.mean for name, each in runs.items() if name != worker]
                if worker in self._shown or not others or own.mean < _SLOW * statistics.median(others):
                    continue
                self._shown.add(worker)
                share = f"{own.waiting / own.seconds:.0%}".replace("%", " %")
                return (
                    f"{worker} is slower than the others: {function} takes {own.mean:.2g} s there ({share} waiting for "
                    f"servers), {statistics.median(others):.2g} s elsewhere"
                )
        return ""
