"""The clocks of hosts, converted to that of one of them; they have unrelated zeros, and drift by 3 ms a minute.
A collective is *matched* on all ranks at nearly the same time, and on none before the last has begun it::

    host a   begun ────────────────────── matched ──        B ≤ t ≤ M     by a's clock
    host b               begun ────────── matched ──        b ≤ t ≤ m     by b's clock
                           t: the last rank begins          B − m ≤ offset ≤ M − b

    offset: what is added to b's clock to get a's

M − m is the offset but for the time until each rank notices, up to a millisecond after a long wait. All
collectives of ten seconds give the narrowest bounds, and the median of M − m, moved into these; between such
intervals the offset changes linearly. Processes of one host share a clock.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

#: The length of an interval with one offset: clocks of hosts differ by less than a millisecond more after it.
_INTERVAL = 10 * 10**9


@dataclass(frozen=True)
class ClockSample:
    """What a collective says about a clock's offset, in nanoseconds: when the last of its ranks called it, and when
    the first of them knew that all had, by this clock; the same of the reference clock's ranks, by that clock.
    """

    begun: int
    matched: int
    reference_begun: int
    reference_matched: int


def clock_map(samples: Iterable[ClockSample], default: int) -> Callable[[int], int]:
    """Returns what converts a time to the reference clock's by these collectives; ``default``: the offset without any.

    >>> clock_map([ClockSample(begun=0, matched=50, reference_begun=130, reference_matched=152)], default=0)(0)
    102
    """
    intervals: defaultdict[int, list[ClockSample]] = defaultdict(list)
    for sample in samples:
        intervals[sample.matched // _INTERVAL].append(sample)
    #: Ascending times, and the offset at each.
    points = [(int(median(each.matched for each in same)), _offset(same)) for _, same in sorted(intervals.items())]
    points = points or [(0, default)]

    def convert(time: int) -> int:
        after = bisect_right(points, (time, 0))
        if after in (0, len(points)):
            return time + points[max(0, after - 1)][1]
        (begin, first), (end, second) = points[after - 1 : after + 1]
        return time + first + (second - first) * (time - begin) // (end - begin)

    return convert


def _offset(samples: list[ClockSample]) -> int:
    least = max(each.reference_begun - each.matched for each in samples)
    most = min(each.reference_matched - each.begun for each in samples)
    middle = int(median(each.reference_matched - each.matched for each in samples))
    if least > most:  # the clocks have drifted apart by more than the bounds are wide
        return (least + most) // 2
    return min(max(middle, least), most)
