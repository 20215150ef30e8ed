"""A trace: the parts of all ranks, merged into what Perfetto shows, on one clock.

::

    records of one thread        begun ──── matched ───────── done        begun ─ … ─ done
                                   │  wait     │   transfer     │           step, bucket, epoch
                                   └──── Call of a collective ──┘           Interval

The calls of one collective have the same *number* in the same process set, because all ranks match collectives in
one order. The rank whose call begins last is the one for which the others wait.

The clocks of hosts have unrelated zeros, and drift by 3 ms a minute. A collective is *matched* on all ranks at nearly
the same time, and on none before the last has begun it::

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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

from choros.observe.events import Kind
from choros.observe.timeline import Record, TimelinePart

EPOCHS, STEPS, COLLECTIVES, BUCKETS, MOMENTS = "epochs", "steps", "collectives", "buckets", "moments"
#: Times are multiples of an eighth of a microsecond, which is exact in decimal and in binary: slices that touch in the
#: trace touch in every reader, however it converts microseconds.
_TICK = 125
#: The mark of a moment at which all ranks have called a collective: what a cycle is in Horovod.
_CYCLE = "CYCLE_START"
#: What lasts from one kind of event to another: the other kind, the track, and what one is called.
_INTERVALS = {
    Kind.EPOCH_BEGUN: (Kind.EPOCH_DONE, EPOCHS, "epoch"),
    Kind.STEP_BEGUN: (Kind.STEP_DONE, STEPS, "step"),
    Kind.BUCKET_BEGUN: (Kind.BUCKET_DONE, BUCKETS, "bucket"),
}
_ENDS = {end: begin for begin, (end, _, _) in _INTERVALS.items()}
_MOMENTS = (Kind.COMMIT, Kind.CHECKPOINT, Kind.RANK_CRASHED)
#: The length of an interval with one offset: clocks of hosts differ by less than a millisecond more after it.
_INTERVAL = 10 * 10**9
#: Of a collective, by one clock, in nanoseconds: when the last of its ranks called it, and the first knew that all had.
Bounds = tuple[int, int]


@dataclass(frozen=True)
class TracedRank:
    """A rank of a trace. All times of a trace are nanoseconds since its begin, in steps of 125."""

    rank: int
    host: str
    began: int
    ended: int


@dataclass(frozen=True)
class Call:
    """A rank's call of a collective; ``number``: its position in the order in which these ranks matched collectives.
    ``matched``: when it knew that all had called it; ``ended``: or the recording's end. ``None``: that never happened.
    """

    rank: int
    name: str
    collective: str
    ranks: tuple[int, ...]
    number: int | None
    began: int
    matched: int | None
    ended: int
    bytes: int | None
    track: ClassVar = COLLECTIVES

    @property
    def wait(self) -> int:
        """How long it waited for other ranks."""
        return (self.ended if self.matched is None else self.matched) - self.began

    @property
    def transfer(self) -> int:
        """How long the data took."""
        return 0 if self.matched is None else self.ended - self.matched


@dataclass(frozen=True)
class CallsOfCollective:
    """A collective's calls, in the order in which they began; ``missing``: recorded ranks that did not call it."""

    calls: tuple[Call, ...]
    missing: tuple[int, ...] = ()

    @property
    def last(self) -> int | None:
        """The rank for which the others waited; ``None`` if only one rank was recorded."""
        if self.missing and all(call.matched is None for call in self.calls):
            return self.missing[0]
        return self.calls[-1].rank if len(self.calls) > 1 else None

    @property
    def waits(self) -> dict[int, int]:
        """How long each other rank waited for ``last``."""
        if self.last is None:
            return {}
        if self.last in self.missing:
            return {call.rank: call.wait for call in self.calls}
        late = self.calls[-1].began
        return {call.rank: max(0, min(call.wait, late - call.began)) for call in self.calls[:-1]}


@dataclass(frozen=True)
class Interval:
    """A step, bucket or epoch of a rank, in the track ``steps``, ``buckets`` or ``epochs``, named like ``step 3``; or
    in ``moments``, what happened at one time.
    """

    rank: int
    track: str
    name: str
    began: int
    ended: int
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """A job's timeline; ``wall``: its begin, nanoseconds since 1970 by the first rank's host; ``ranks``: recorded."""

    size: int
    wall: int
    ranks: tuple[TracedRank, ...]
    calls: tuple[Call, ...]
    intervals: tuple[Interval, ...] = ()


def merge(parts: Iterable[TimelinePart]) -> Trace:
    """Merges the parts of one rank or more, with the clock of the first rank's host, to which others' are converted."""
    ordered = sorted(parts, key=lambda part: part.rank)
    maps = _clock_maps(ordered)
    start = min(maps[part.clock](part.began) for part in ordered)
    aligned = [_aligned(part, maps[part.clock], start) for part in ordered]
    calls = [_calls(part) for part in aligned]
    return Trace(
        max(part.size for part in ordered),
        ordered[0].wall + start,
        tuple(TracedRank(part.rank, part.host, part.began, part.ended) for part in aligned),
        tuple(call for each in calls for call in each),
        tuple(
            each for part, own in zip(aligned, calls, strict=True) for each in (*_intervals(part), *_moments(part, own))
        ),
    )


def collectives_of(calls: Iterable[Call], recorded: Sequence[int] = ()) -> list[CallsOfCollective]:
    """Returns calls by collective, first called first; a ``recorded`` rank without a call of one is missing there."""
    found: defaultdict[Hashable, list[Call]] = defaultdict(list)
    seen: defaultdict[Hashable, int] = defaultdict(int)
    for call in calls:
        key = (call.ranks, call.name if call.number is None else call.number)
        # A process set that is registered again counts from the start.
        found[key, seen[call.rank, key]].append(call)
        seen[call.rank, key] += 1
    result = []
    for same in found.values():
        missing = set(same[0].ranks).intersection(recorded) - {call.rank for call in same}
        result.append(CallsOfCollective(tuple(sorted(same, key=lambda call: call.began)), tuple(sorted(missing))))
    return sorted(result, key=lambda collective: collective.calls[0].began)


def _clock_maps(parts: Sequence[TimelinePart]) -> dict[str, Callable[[int], int]]:
    """Returns the map of each clock to that of the first rank."""
    reference = parts[0]
    # By the first rank of each clock: 0 for the reference.
    defaults = {part.clock: part.wall - reference.wall for part in reversed(parts)}
    if len(defaults) == 1:
        return {reference.clock: clock_map((), 0)}
    clocks = {part.rank: part.clock for part in parts}
    samples: defaultdict[str, list[tuple[Bounds, Bounds]]] = defaultdict(list)
    for collective in collectives_of(call for part in parts for call in _calls(part)):
        by_clock: defaultdict[str, list[Call]] = defaultdict(list)
        for call in collective.calls:
            by_clock[clocks[call.rank]].append(call)
        bounds = {clock: _bounds(same) for clock, same in by_clock.items()}
        expected = bounds.pop(reference.clock, None)
        for clock, own in bounds.items():
            if own is not None and expected is not None:
                samples[clock].append((own, expected))
    return {clock: clock_map(samples[clock], default) for clock, default in defaults.items()}


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


def _aligned(part: TimelinePart, clock: Callable[[int], int], start: int) -> TimelinePart:
    """Returns ``part`` with the times of a trace."""

    def converted(time: int) -> int:
        return (clock(time) - start) // _TICK * _TICK

    records = tuple(replace(record, time=converted(record.time)) for record in part.records)
    return replace(part, records=records, began=converted(part.began), ended=converted(part.ended))


def _bounds(calls: Iterable[Call]) -> Bounds | None:
    """Those of calls on one clock; ``None`` if none was matched."""
    matches = [call.matched for call in calls if call.matched is not None]
    return (max(call.began for call in calls), min(matches)) if matches else None


def _calls(part: TimelinePart) -> list[Call]:
    """Pairs the events of collectives."""
    everyone = tuple(range(part.size))
    calls: list[Call] = []
    #: Of each thread: one that waits for its turn may run another collective meanwhile.
    under_way: defaultdict[int, list[Call]] = defaultdict(list)
    for record in part.records:
        calls_of_thread = under_way[record.thread]
        if record.kind is Kind.COLLECTIVE_BEGUN:
            ranks = tuple(record.details.get("process_set", everyone))
            collective = record.details.get("collective", record.name)
            calls_of_thread.append(
                Call(part.rank, record.name, collective, ranks, None, record.time, None, part.ended, None)
            )
        elif calls_of_thread and record.kind is Kind.COLLECTIVE_MATCHED:
            number = record.details.get("number")
            calls_of_thread[-1] = replace(calls_of_thread[-1], number=number, matched=record.time)
        elif calls_of_thread and record.kind is Kind.COLLECTIVE_DONE:
            calls.append(replace(calls_of_thread.pop(), ended=record.time, bytes=record.details.get("bytes", 0)))
    return calls + [call for each in under_way.values() for call in each]


def _intervals(part: TimelinePart) -> list[Interval]:
    intervals: list[Interval] = []
    under_way: dict[tuple[Kind, int, str], Record] = {}
    for record in part.records:
        if record.kind in _INTERVALS:
            under_way[record.kind, record.thread, record.name] = record
        elif record.kind in _ENDS:
            begin = under_way.pop((_ENDS[record.kind], record.thread, record.name), None)
            if begin is not None:
                intervals.append(_interval(part, begin, record.time, record.details))
    return intervals + [_interval(part, begin, part.ended, {"unfinished": True}) for begin in under_way.values()]


def _interval(part: TimelinePart, begin: Record, ended: int, details: Mapping[str, Any]) -> Interval:
    _, track, noun = _INTERVALS[begin.kind]
    number = f" {begin.details[noun]}" if noun in begin.details else ""
    of = f" of {begin.name}" if begin.name else ""
    together = {name: value for name, value in {**begin.details, **details}.items() if name not in (noun, "seconds")}
    return Interval(part.rank, track, f"{noun}{number}{of}", begin.time, ended, together)


def _moments(part: TimelinePart, calls: Sequence[Call]) -> list[Interval]:
    named = [(f"{record.kind}: {record.name}", record.time) for record in part.records if record.kind in _MOMENTS]
    if part.mark_cycles:
        named += [(_CYCLE, call.matched) for call in calls if call.matched is not None]
    return [Interval(part.rank, MOMENTS, name, time, time, {}) for name, time in named]
