"""Statistics of measurements: the trials of a contender give a summary, two summaries give ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ratios", "Summary", "Timing", "Trial", "format_seconds", "ratios", "summarise", "trial_of"]


@dataclass(frozen=True)
class Timing:
    """The measurements of one process in a trial.

    Attributes:
        begins: the start time of each run, in seconds of a clock that all processes of the machine share.
        ends: the end time of each run.
        cpu_s: CPU time of the process and of its ended children during all runs.
    """

    begins: tuple[float, ...]
    ends: tuple[float, ...]
    cpu_s: float


@dataclass(frozen=True)
class Trial:
    """A trial: one contender's part of a round.

    Attributes:
        seconds: wall time for one unit of work.
        cpu_s: CPU time of all its processes for one unit of work.
    """

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Summary:
    """The best, the median and the median CPU time of a contender's rounds, in seconds for one unit of work."""

    best_s: float
    median_s: float
    cpu_s: float


@dataclass(frozen=True)
class Ratios:
    """A peer's summary divided by choros': above 1, choros takes less."""

    best: float
    median: float
    cpu: float


def trial_of(timings: Sequence[Timing], units: int) -> Trial:
    """Returns the times of a trial from the timings of its processes.

    A run lasts from the start of the last process, which excludes the skew that the barrier leaves, to the end of
    the slowest.

    Args:
        timings: one of each process that had a part in the trial.
        units: units of work in one run.

    Example:
        >>> trial_of([Timing((0.0,), (4.0,), 4.0), Timing((1.0,), (5.0,), 2.0)], units=2)
        Trial(seconds=2.0, cpu_s=3.0)
    """
    begins = map(max, zip(*(timing.begins for timing in timings), strict=True))
    ends = map(max, zip(*(timing.ends for timing in timings), strict=True))
    runs = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return Trial(statistics.fmean(runs) / units, sum(timing.cpu_s for timing in timings) / (len(runs) * units))


def summarise(trials: Sequence[Trial]) -> Summary:
    """Returns the best and the median of a contender's ``trials``.

    Example:
        >>> summarise([Trial(3.0, 1.0), Trial(1.0, 2.0), Trial(8.0, 6.0)])
        Summary(best_s=1.0, median_s=3.0, cpu_s=2.0)
    """
    seconds = [trial.seconds for trial in trials]
    return Summary(min(seconds), statistics.median(seconds), statistics.median(trial.cpu_s for trial in trials))


def ratios(peer: Summary, ours: Summary) -> Ratios:
    """Returns the peer's times divided by ours.

    Example:
        >>> ratios(Summary(2.0, 6.0, 1.0), Summary(1.0, 2.0, 2.0))
        Ratios(best=2.0, median=3.0, cpu=0.5)
    """
    cpu = peer.cpu_s / ours.cpu_s if ours.cpu_s else float("nan")  # the resolution of CPU time may be coarse
    return Ratios(peer.best_s / ours.best_s, peer.median_s / ours.median_s, cpu)


def format_seconds(seconds: float) -> str:
    """Formats ``seconds`` with three digits and a unit.

    Example:
        >>> format_seconds(8.14e-6), format_seconds(0.0144), format_seconds(2.5), format_seconds(0.12345)
        ('8.14 µs', '14.4 ms', '2.50 s', '123 ms')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "µs":
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    raise AssertionError
