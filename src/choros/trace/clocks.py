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
from statistics import median

#: The length of an interval with one offset: clocks of hosts differ by less than a millisecond more after it.
_INTERVAL = 10 * 10**9


#: Of a collective, by one clock, in nanoseconds: when the last of its ranks called it, and the first knew that all had.
Bounds = tuple[int, int]


def clock_map(samples: Iterable[tuple[Bounds, Bounds]], default: int) -> Callable[[int], int]:
    """Returns what converts a time to the reference clock's by collectives' bounds, by this clock and the reference;
    ``default``: the offset without any.

    >>> clock_map([((0, 50), (130, 152))], default=0)(0)
    102
    """
    intervals: defaultdict[int, list[tuple[Bounds, Bounds]]] = defaultdict(list)
    for own, reference in samples:
        intervals[own[1] // _INTERVAL].append((own, reference))
    #: Ascending times, and the offset at each.
    points = [(int(median(own[1] for own, _ in same)), _offset(same)) for _, same in sorted(intervals.items())]
    points = points or [(0, default)]

    def convert(time: int) -> int:
        after = bisect_right(points, (time, 0))
        if after in (0, len(points)):
            return time + points[max(0, after - 1)][1]
        (begin, first), (end, second) = points[after - 1 : after + 1]
        return time + first + (second - first) * (time - begin) // (end - begin)

    return convert


def _offset(samples: list[tuple[Bounds, Bounds]]) -> int:
    least = max(reference_begun - matched for (_, matched), (reference_begun, _) in samples)
    most = min(reference_matched - begun for (begun, _), (_, reference_matched) in samples)
    middle = int(median(reference_matched - matched for (_, matched), (_, reference_matched) in samples))
    if least > most:  # the clocks have drifted apart by more than the bounds are wide
        return (least + most) // 2
    return min(max(middle, least), most)
