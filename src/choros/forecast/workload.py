"""The work of a step, as a timeline has it::

rank 0   ── compute ──┤wait├ bucket 0 ┤ bucket 1 ┤── compute ──┤
rank 1   ───── compute ────┤ bucket 0 ┤ bucket 1 ┤──── …
         ▲                 ▲
         end of the last   how much later than the mean: a deviation
"""

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from choros.errors import ConfigError
from choros.trace.trace import BUCKETS, EPOCHS, STEPS, Call, Interval, Trace

_NS = 1e-9


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced at once; ``ready_s``: when they are computed, since the step's begin."""

    nbytes: int
    arrays: int
    ready_s: float


@dataclass(frozen=True)
class Workload:
    """A step of a recorded job. Seconds are medians over steps; ``deviations`` are those of a rank's compute time from
    the mean of all in the same step, sorted. ``others``: the bytes of what else is reduced between two steps.
    """

    ranks: int
    hosts: int
    compute_s: float
    deviations: tuple[float, ...]
    buckets: tuple[Bucket, ...]
    transfer_s: float
    others: tuple[int, ...] = ()
    steps_per_epoch: int | None = None

    @property
    def nbytes(self) -> int:
        """All gradients' bytes."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def straggler_s(self, ranks: int) -> float:
        """How much later than the mean the last of ``ranks`` ranks is expected.

        >>> Workload(2, 1, 1.0, (-0.1, 0.0, 0.0, 0.1), (), 0.0).straggler_s(1)
        0.0
        """
        return expected_maximum(self.deviations, ranks) - expected_maximum(self.deviations, 1)


@dataclass(frozen=True)
class _RankStep:
    """A rank's step: what it computed since the last one, and its calls."""

    number: str
    compute: int
    calls: tuple[tuple[Call, int, int], ...]
    others: tuple[int, ...]

    @property
    def transfer(self) -> int:
        return sum(call.transfer for call, _, _ in self.calls)


def expected_maximum(values: Sequence[float], count: int) -> float:
    """The expected largest of ``count`` draws from the sorted ``values``: the straggler among so many ranks.

    >>> expected_maximum([0.0, 1.0], 1), expected_maximum([0.0, 1.0], 3)
    (0.5, 0.875)
    """
    size = len(values)
    return sum(value * ((i / size) ** count - ((i - 1) / size) ** count) for i, value in enumerate(values, 1))


def workload_of(trace: Trace) -> Workload:
    """Reads the work of a step from ``trace``; a ``ConfigError`` if it has fewer than three steps with gradients."""
    steps = {rank.rank: _steps(trace, rank.rank) for rank in trace.ranks}
    known = [step for each in steps.values() for step in each]
    most = max((len(step.calls) for step in known), default=0)
    complete = [step for step in known if most and len(step.calls) == most]
    if len(complete) < 2:
        raise ConfigError(
            f"the timeline has {len(complete)} steps whose gradients were reduced in calls with bytes, after the "
            "first: expected 2 or more. Record some dozens on 2 ranks or more, not with the xla engine: "
            "chorosrun -np 2 --timeline-filename FILE."
        )
    compute_s = median(step.compute for step in complete) * _NS
    buckets = tuple(
        Bucket(
            int(median(step.calls[index][0].bytes or 0 for step in complete)),
            complete[0].calls[index][1],
            min(compute_s, median(step.calls[index][2] for step in complete) * _NS),
        )
        for index in range(most)
    )
    return Workload(
        len(trace.ranks),
        len({rank.host for rank in trace.ranks}),
        compute_s,
        _deviations(steps),
        buckets,
        median(step.transfer for step in complete) * _NS,
        sorted((step.others for step in complete), key=len)[len(complete) // 2],
        _steps_per_epoch(trace),
    )


def _steps(trace: Trace, rank: int) -> list[_RankStep]:
    """The steps of a rank after its first one, in order."""
    of_rank = [each for each in trace.intervals if each.rank == rank]
    steps = sorted((each for each in of_rank if each.track == STEPS), key=lambda each: each.began)
    buckets = sorted((each for each in of_rank if each.track == BUCKETS), key=lambda each: each.began)
    calls = sorted((call for call in trace.calls if call.rank == rank), key=lambda call: call.began)
    began, begun = [each.began for each in buckets], [call.began for call in calls]
    return [
        _step(
            before.ended,
            step,
            buckets[bisect_left(began, step.began) : bisect_left(began, step.ended)],
            calls[bisect_left(begun, before.ended) : bisect_left(begun, step.ended)],
        )
        for before, step in itertools.pairwise(steps)
        if step.details.get("examples") and not step.details.get("joined")
    ]


def _step(begin: int, step: Interval, buckets: Sequence[Interval], calls: Sequence[Call]) -> _RankStep:
    own = [
        (call, int(bucket.details.get("arrays", 1)), call.began - begin)
        for bucket in buckets
        for call in calls
        if call.began <= bucket.began < call.ended and call.bytes
    ]
    end = own[-1][0].began if own else step.began
    gradients = {call.began for call, _, _ in own}
    others = [call for call in calls if begin <= call.began < end and call.began not in gradients]
    elsewhere = sum(call.ended - call.began for call in others if call.ended <= end)
    return _RankStep(step.name, max(0, end - begin - elsewhere), tuple(own), tuple(call.bytes or 0 for call in others))


def _deviations(steps: Mapping[int, Sequence[_RankStep]]) -> tuple[float, ...]:
    """How far each rank's step is from the mean of all ranks in this step, or a single rank's from its median step.
    The mean of a few ranks is near each of them: deviations are enlarged by what this hides (Bessel's correction).
    """
    of_step: defaultdict[str, list[int]] = defaultdict(list)
    for each in steps.values():
        for step in each:
            of_step[step.number].append(step.compute)
    if len(steps) == 1:
        times = [times[0] for times in of_step.values()]
        return tuple(sorted((time - median(times)) * _NS for time in times))
    deviations = [
        (time - fmean(times)) * (len(times) / (len(times) - 1)) ** 0.5 * _NS
        for times in of_step.values()
        if len(times) > 1
        for time in times
    ]
    return tuple(sorted(deviations)) or (0.0,)


def _steps_per_epoch(trace: Trace) -> int | None:
    """The most steps of a rank in an epoch; ``None`` if no epoch was recorded to its end."""
    counts = [
        sum(
            epoch.began <= each.began < epoch.ended
            for each in trace.intervals
            if each.track == STEPS and each.rank == epoch.rank
        )
        for epoch in trace.intervals
        if epoch.track == EPOCHS and not epoch.details.get("unfinished")
    ]
    return max(counts, default=0) or None
