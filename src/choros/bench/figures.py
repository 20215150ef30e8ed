"""Statistics of measurements: the trials of a contender give a summary, two summaries give ratios."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Of a process in a trial: when its runs began and ended, by a clock that all share, and its CPU time, with that of its
#: ended children.
Timing = tuple[Sequence[float], Sequence[float], float]


@dataclass(frozen=True)
class Trial:
    """A trial, one contender's part of a round: wall time, and CPU time of all its processes, for one unit of work."""

    seconds: float
    cpu_s: float


def trial_of(timings: Sequence[Timing], units: int) -> Trial:
    """Returns the times of a trial; a run lasts from the last process's start, without the barrier's skew, to the end.

    >>> trial_of([([0.0], [4.0], 4.0), ([1.0], [5.0], 2.0)], units=2)
    Trial(seconds=2.0, cpu_s=3.0)
    """
    begins, ends, cpu = zip(*timings, strict=True)
    pairs = zip(zip(*begins, strict=True), zip(*ends, strict=True), strict=True)
    runs = [max(ended) - max(began) for began, ended in pairs]
    return Trial(statistics.fmean(runs) / units, sum(cpu) / (len(runs) * units))


def summarise(trials: Sequence[Trial]) -> dict[str, float]:
    """Returns the best, the median and the median CPU time of a contender's rounds.

    >>> summarise([Trial(3.0, 1.0), Trial(1.0, 2.0), Trial(8.0, 6.0)])
    {'best_s': 1.0, 'median_s': 3.0, 'cpu_s': 2.0}
    """
    seconds, cpu = [trial.seconds for trial in trials], [trial.cpu_s for trial in trials]
    return {"best_s": min(seconds), "median_s": statistics.median(seconds), "cpu_s": statistics.median(cpu)}


def ratios(peer: Mapping[str, float], ours: Mapping[str, float]) -> tuple[float, float, float]:
    """Returns the peer's best, median and CPU time divided by ours: above 1, ours is less.

    >>> ratios({"best_s": 2.0, "median_s": 6.0, "cpu_s": 1.0}, {"best_s": 1.0, "median_s": 2.0, "cpu_s": 2.0})
    (2.0, 3.0, 0.5)
    """
    cpu = peer["cpu_s"] / ours["cpu_s"] if ours["cpu_s"] else float("nan")  # the resolution of CPU time may be coarse
    return peer["best_s"] / ours["best_s"], peer["median_s"] / ours["median_s"], cpu


#: α and β of a model of collectives: the seconds of a message, and those of a byte.
AlphaBeta = tuple[float, float]


def allreduce_terms(ranks: int, size: float) -> AlphaBeta:
    """Returns how often α and β are in the time of an allreduce of ``size`` bytes by 2 ranks or more: the latency of
    recursive halving and doubling, and the fewest bytes that any algorithm must move (Rabenseifner 2004; Thakur,
    Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009). β includes arithmetic.

    >>> allreduce_terms(ranks=4, size=1000)
    (4.0, 1500.0)
    """
    return 2 * math.log2(ranks), 2 * (ranks - 1) / ranks * size


def fit(terms: Sequence[AlphaBeta], seconds: Sequence[float]) -> AlphaBeta | None:
    """Returns α and β, neither negative, with which the ``terms`` give ``seconds`` best, by least squares of *relative*
    errors: sizes span orders of magnitude; ``None`` if there are not two kinds of terms.

    >>> terms = [allreduce_terms(2, size) for size in (2**10, 2**20, 2**26)]
    >>> alpha, beta = fit(terms, [1e-5 * messages + 1e-9 * size for messages, size in terms])
    >>> round(alpha * 1e6, 3), round(beta * 1e9, 3)
    (10.0, 1.0)
    """
    if len(set(terms)) < 2:
        return None
    times = np.asarray(seconds, np.float64)
    matrix = np.array(terms) / times[:, None]
    solution = np.linalg.lstsq(matrix, np.ones(len(times)), rcond=None)[0]  # as NumPy 2 does without it
    if solution.min() < 0:  # fit one alone: β, unless only α is positive
        kept = 0 if solution[0] > 0 else 1
        column = matrix[:, kept]
        solution = np.zeros(2)
        solution[kept] = column.sum() / (column @ column)
    return float(solution[0]), float(solution[1])
