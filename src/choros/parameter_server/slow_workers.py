"""Slow workers: functions take longer there; none waits, but their updates use older variables. Pure."""

import statistics
from typing import final

#: The runs of a function on a worker, without the first one, which compiles it.
_FEWEST_RUNS = 10
_SLOW = 1.5


@final
class WorkerTimes:
    """Compares the workers of a job.

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
