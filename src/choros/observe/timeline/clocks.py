"""The clocks of hosts, converted to that of one of them.

The monotonic clocks of two hosts have unrelated zeros, and one runs a little faster: by 50 parts in a million, they
differ by 3 ms more every minute. A collective shows by how much they differ, because it is *matched* on all ranks at
nearly the same time, and on no rank before the last one has begun it::

    host a   begun ────────────────────── matched ──        B ≤ t ≤ M     by a's clock
    host b               begun ────────── matched ──        b ≤ t ≤ m     by b's clock
                           t: the last rank begins          B − m ≤ offset ≤ M − b

    offset: what is added to b's clock to get a's

M − m is the offset but for the time in which each rank notices, which is up to a millisecond for one that has waited
long. All collectives of ten seconds together give the narrowest bounds, and the median of M − m, moved into these.
Between such intervals the offset changes linearly. Processes of one host share a clock: there is nothing to convert.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

__all__ = ["ClockMap", "ClockSample", "clock_map"]

#: The length of an interval with one offset: clocks of hosts differ by less than a millisecond more after it.
_INTERVAL = 10 * 10**9


@dataclass(frozen=True)
class ClockSample:
    """What one collective says about the offset of a clock to the reference; all in nanoseconds.

    Attributes:
        begun: when the last rank with this clock called it, by this clock.
        matched: when the first of these ranks knew that all had, by this clock.
        reference_begun: the same of the ranks with the reference clock, by the reference clock.
        reference_matched: likewise.
    """

    begun: int
    matched: int
    reference_begun: int
    reference_matched: int


@dataclass(frozen=True)
class ClockMap:
    """Converts the times of a clock to those of the reference clock.

    Attributes:
        points: times of this clock, and the offset at each, in nanoseconds; ascending, at least one.

    Example:
        >>> ClockMap(((0, 100), (1000, 200)))(500)
        650
    """

    points: tuple[tuple[int, int], ...]

    def __call__(self, time: int) -> int:
        """Returns ``time`` by the reference clock."""
        after = bisect_right(self.points, (time, 0))
        if after in (0, len(self.points)):
            return time + self.points[max(0, after - 1)][1]
        (begin, first), (end, second) = self.points[after - 1 : after + 1]
        return time + first + (second - first) * (time - begin) // (end - begin)


def clock_map(samples: Iterable[ClockSample], default: int) -> ClockMap:
    """Returns the map of a clock to the reference clock.

    Args:
        samples: of the collectives that ranks of both clocks called.
        default: the offset if there are none.

    Example:
        >>> clock_map([ClockSample(begun=0, matched=50, reference_begun=130, reference_matched=152)], default=0)(0)
        102
    """
    intervals: defaultdict[int, list[ClockSample]] = defaultdict(list)
    for sample in samples:
        intervals[sample.matched // _INTERVAL].append(sample)
    points = tuple((int(median(each.matched for each in same)), _offset(same)) for _, same in sorted(intervals.items()))
    return ClockMap(points or ((0, default),))


def _offset(samples: list[ClockSample]) -> int:
    least = max(each.reference_begun - each.matched for each in samples)
    most = min(each.reference_matched - each.begun for each in samples)
    middle = int(median(each.reference_matched - each.matched for each in samples))
    if least > most:  # the clocks have drifted apart by more than the bounds are wide
        return (least + most) // 2
    return min(max(middle, least), most)
