"""Statistics of measurements: the trials of a contender give a summary, two summaries give ratios."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timing:
    """A process's runs in a trial, by a clock that all share; ``cpu_s`` includes its ended children."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]
    cpu_s: float


@dataclass(frozen=True)
class Trial:
    """A trial, one contender's part of a round: wall time, and CPU time of all its processes, for one unit of work."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Summary:
    """The best, the median and the median CPU time of a contender's rounds, in seconds for one unit of work."""

    best_s: float
    median_s: float
    cpu_s: float


def trial_of(timings: Sequence[Timing], units: int) -> Trial:
    """Returns the times of a trial; a run lasts from the last process's start, without the barrier's skew, to the end.

    >>> trial_of([Timing((0.0,), (4.0,), 4.0), Timing((1.0,), (5.0,), 2.0)], units=2)
    Trial(seconds=2.0, cpu_s=3.0)
    """
    begins = map(max, zip(*(timing.begins for timing in timings), strict=True))
    ends = map(max, zip(*(timing.ends for timing in timings), strict=True))
    runs = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return Trial(statistics.fmean(runs) / units, sum(timing.cpu_s for timing in timings) / (len(runs) * units))


def summarise(trials: Sequence[Trial]) -> Summary:
    """Returns the best and the median of a contender's ``trials``.

    >>> summarise([Trial(3.0, 1.0), Trial(1.0, 2.0), Trial(8.0, 6.0)])
    Summary(best_s=1.0, median_s=3.0, cpu_s=2.0)
    """
    seconds = [trial.seconds for trial in trials]
    return Summary(min(seconds), statistics.median(seconds), statistics.median(trial.cpu_s for trial in trials))


def ratios(peer: Summary, ours: Summary) -> tuple[float, float, float]:
    """Returns the peer's best, median and CPU time divided by ours: above 1, ours is less.

    >>> ratios(Summary(2.0, 6.0, 1.0), Summary(1.0, 2.0, 2.0))
    (2.0, 3.0, 0.5)
    """
    cpu = peer.cpu_s / ours.cpu_s if ours.cpu_s else float("nan")  # the resolution of CPU time may be coarse
    return peer.best_s / ours.best_s, peer.median_s / ours.median_s, cpu


def format_ranks(ranks: int) -> str:
    """Returns ``1 rank``, ``2 ranks``, …"""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def format_seconds(seconds: float) -> str:
    """Formats ``seconds`` with three digits and a unit.

    >>> format_seconds(8.14e-6), format_seconds(0.0144), format_seconds(2.5), format_seconds(0.12345)
    ('8.14 µs', '14.4 ms', '2.50 s', '123 ms')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "µs":
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    raise AssertionError


@dataclass(frozen=True)
class AlphaBeta:
    """The α-β model of an allreduce of n bytes by p ranks, 2 or more, ``T(n) = 2·lg p·α + 2·(p−1)/p·n·β``: the latency
    of recursive halving and doubling, and the fewest bytes that any algorithm must move (Rabenseifner 2004; Thakur,
    Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009). β includes arithmetic.

    >>> AlphaBeta(ranks=4, alpha_s=1e-6, beta_s=1e-9).seconds(1000)
    5.5e-06
    """

    ranks: int
    alpha_s: float
    beta_s: float

    def seconds(self, size: float) -> float:
        """Returns the time of an allreduce of ``size`` bytes."""
        per_message, per_byte = _coefficients(self.ranks, size)
        return per_message * self.alpha_s + per_byte * self.beta_s


def _coefficients(ranks: int, size: float) -> tuple[float, float]:
    return 2 * math.log2(ranks), 2 * (ranks - 1) / ranks * size


def fit(ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta | None:
    """Returns the best fit by *relative* error: sizes span orders of magnitude; ``None`` for one rank or one size.

    >>> truth = AlphaBeta(2, 1e-5, 1e-9)
    >>> fitted = fit(2, [2**10, 2**20, 2**26], [truth.seconds(n) for n in (2**10, 2**20, 2**26)])
    >>> round(fitted.alpha_s * 1e6, 3), round(fitted.beta_s * 1e9, 3)
    (10.0, 1.0)
    """
    if ranks < 2 or len(sizes) < 2:
        return None
    return AlphaBeta(ranks, *nearest([_coefficients(ranks, size) for size in sizes], seconds))


def nearest(coefficients: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns α and β, neither negative, for which the sums of their products with each row of ``coefficients`` are
    nearest to ``seconds``, by least squares of *relative* errors.
    """
    times = np.asarray(seconds, np.float64)
    matrix = np.array(coefficients) / times[:, None]
    solution = np.linalg.lstsq(matrix, np.ones(len(times)), rcond=None)[0]  # as NumPy 2 does without it
    if solution.min() < 0:  # fit one alone: β, unless only α is positive
        kept = 0 if solution[0] > 0 else 1
        column = matrix[:, kept]
        solution = np.zeros(2)
        solution[kept] = column.sum() / (column @ column)
    return float(solution[0]), float(solution[1])
