"""The files of a timeline: the parts, and the merged one, in Chrome's trace format, which Perfetto opens.

::

    FILE.json                     written whole, then renamed to this name: at any time it is absent or complete
    FILE.json.parts/rank-3.jsonl  while rank 3 records, and if the job did not come to merge it

    a rank           ─►  a process (``pid``, the rank + 1: Perfetto takes 0 for the idle process), "rank 0 on HOST"
    a track          ─►  a thread (``tid``): epochs, steps, buckets, collectives; more than one if intervals overlap
    a call           ─►  a slice with the collective's name; within it "wait" and "transfer"
    a step, a bucket ─►  a slice
    a moment         ─►  an instant event

Times are microseconds, to three decimals; one event on a line. Waits and transfers also have the names of
Horovod's timeline, as categories.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from choros.durable import unfinished
from choros.observe.timeline import TimelinePart, part_files, read_part, remove_part
from choros.trace.trace import (
    BUCKETS,
    COLLECTIVES,
    EPOCHS,
    MOMENTS,
    STEPS,
    Call,
    Interval,
    Trace,
    TracedRank,
    collectives_of,
    merge,
)  # fmt: skip

#: The tracks of a rank, from top to bottom.
_TRACKS = (EPOCHS, STEPS, COLLECTIVES, BUCKETS, MOMENTS)
_FORMAT = 1
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_trace(file: Path, parts: Iterable[TimelinePart]) -> None:
    """Merges ``parts`` to ``file``; a reader sees the old file or the new one, never a part of it."""
    # Without chorosrun, several ranks may merge what an exception has left.
    with unfinished(file) as name, name.open("w") as output:
        output.writelines(to_json(merge(parts)))


def merge_parts(file: Path) -> bool:
    """Merges the parts that lie beside ``file`` to it; returns whether there are any."""
    parts = _read_parts(file)
    if parts:
        write_trace(file, parts)
    return bool(parts)


def read_trace(file: Path) -> Trace:
    """Returns the trace of the parts beside ``file``, else that in it; ``FileNotFoundError``: neither is there."""
    parts = _read_parts(file)
    return merge(parts) if parts else from_json(file.read_bytes())


def merge_left_parts(file: Path) -> None:
    """Merges the parts that ranks have left, which have ended, and removes them."""
    if merge_parts(file):
        for rank in part_files(file):
            remove_part(file, rank)


def _read_parts(file: Path) -> list[TimelinePart]:
    parts = []
    for path in part_files(file).values():
        # It is empty, because its rank was killed when it had just created it; or its rank has removed it by now.
        with suppress(ValueError, FileNotFoundError):
            parts.append(read_part(path.read_bytes()))
    return parts


def to_json(trace: Trace) -> Iterator[str]:
    """Yields the lines of a file with ``trace``.

    >>> trace = Trace(1, 0, (TracedRank(0, "host", 0, 9000),), (), (Interval(0, STEPS, "step 1", 0, 9000, {}),))
    >>> json.loads("".join(to_json(trace)))["traceEvents"][-1]["name"]
    'step 1'
    >>> from_json("".join(to_json(trace))) == trace
    True
    """
    ranks = [
        {"rank": each.rank, "host": each.host, "began": _us(each.began), "ended": _us(each.ended)}
        for each in trace.ranks
    ]
    about = {
        "timeline_of_choros": _FORMAT,
        "size": trace.size,
        "ranks": ranks,
        "start_time_since_epoch_in_micros": trace.wall // 1000,
        "wall_ns": trace.wall,
    }
    yield f'{{"displayTimeUnit":"ms","otherData":{_encode(about)},"traceEvents":[\n'
    separator = ""
    for event in _events(trace):
        yield separator + _encode(event)
        separator = ",\n"
    yield "\n]}\n"


def from_json(text: str | bytes) -> Trace:
    """Returns the trace in a file that ``to_json`` wrote; a ``ValueError`` if the text is none."""
    try:
        data = json.loads(text)
        if "otherData" not in data:
            raise ValueError(
                "the record of --report is read by choros report" if "ranks" in data else "it has no events"
            )
        about = data["otherData"]
        ranks = tuple(
            TracedRank(each["rank"], each["host"], _ns(each["began"]), _ns(each["ended"])) for each in about["ranks"]
        )
        if not ranks or about["timeline_of_choros"] != _FORMAT:
            raise ValueError("it has no ranks, or another version of choros has written it")
        everyone = tuple(range(about["size"]))
        calls: list[Call] = []
        intervals: list[Interval] = []
        for event in data["traceEvents"]:
            kind, category = event["ph"], event.get("cat")
            if kind == "i":
                time = _ns(event["ts"])
                intervals.append(Interval(_rank(event), MOMENTS, event["name"], time, time, {}))
            elif kind == "X" and category == COLLECTIVES:
                calls.append(_call(event, everyone))
            elif kind == "X" and category in _TRACKS:
                begin = _ns(event["ts"])
                end = begin + _ns(event["dur"])
                intervals.append(Interval(_rank(event), category, event["name"], begin, end, event["args"]))
        return Trace(about["size"], about["wall_ns"], ranks, tuple(calls), tuple(intervals))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"it is not a timeline that choros has written: {error!r}") from error


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank in trace.ranks:
        yield _metadata(rank.rank, 0, "process_name", {"name": f"rank {rank.rank} on {rank.host}"})
        yield _metadata(rank.rank, 0, "process_sort_index", {"sort_index": rank.rank})
    slices: list[Call | Interval] = [*trace.calls, *trace.intervals]
    lanes = _lanes(slices)
    used = {(each.rank, each.track, lane) for each, lane in zip(slices, lanes, strict=True)}
    # A thread's number is used once in the file: 0 is that of a process.
    order = sorted(used, key=lambda each: (each[0], _TRACKS.index(each[1]), each[2]))
    tids = {each: number for number, each in enumerate(order, 1)}
    for (number, track, lane), tid in tids.items():
        yield _metadata(number, tid, "thread_name", {"name": f"{track} {lane + 1}" if lane else track})
        yield _metadata(number, tid, "thread_sort_index", {"sort_index": tid})
    waited_for = {
        (call.rank, call.began): collective.last
        for collective in collectives_of(trace.calls, [each.rank for each in trace.ranks])
        for call in collective.calls
        if call.rank in collective.waits
    }
    for each, lane in zip(slices, lanes, strict=True):
        if isinstance(each, Call):
            events = list(_call_events(each, waited_for.get((each.rank, each.began)), trace.size))
        elif each.track == MOMENTS:
            events = [{"ph": "i", "s": "t", "name": each.name, "ts": _us(each.began)}]
        else:
            events = [_slice(each.name, each.track, each.began, each.ended, each.details)]
        place = {"pid": _pid(each.rank), "tid": tids[each.rank, each.track, lane]}
        yield from ({**event, **place} for event in events)


def _lanes(slices: Sequence[Call | Interval]) -> list[int]:
    """Returns the lane in its track of each slice: slices in one lane do not overlap."""
    numbered = sorted(enumerate(slices), key=lambda each: (each[1].began, each[1].ended))
    ends: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    lanes = [0] * len(numbered)
    for index, each in numbered:
        free = ends[each.rank, each.track]
        lane = next((lane for lane, last in enumerate(free) if last <= each.began), len(free))
        free[lane : lane + 1] = [each.ended]
        lanes[index] = lane
    return lanes


def _call_events(call: Call, waited_for: int | None, size: int) -> Iterator[dict[str, Any]]:
    """The slice of a call; within it those of its wait and its transfer."""
    args: dict[str, Any] = {"collective": call.collective}
    if len(call.ranks) != size:
        args["ranks"] = call.ranks
    if call.bytes is not None:
        args["bytes"] = call.bytes
    if call.matched is not None:
        args |= {"number": call.number, "wait_us": _us(call.wait)}
    yield _slice(call.name, COLLECTIVES, call.began, call.ended, args)
    middle, name = call.began + call.wait, call.collective.upper()
    for_rank = {} if waited_for is None else {"for_rank": waited_for}
    yield _slice("wait", f"wait,NEGOTIATE_{name}", call.began, middle, for_rank)
    if call.matched is not None:
        yield _slice("transfer", f"transfer,{name}", middle, call.ended, {})


def _call(event: dict[str, Any], everyone: tuple[int, ...]) -> Call:
    args, begun = event["args"], _ns(event["ts"])
    wait = args.get("wait_us")
    return Call(
        _rank(event),
        event["name"],
        args["collective"],
        tuple(args.get("ranks", everyone)),
        args.get("number"),
        begun,
        None if wait is None else begun + _ns(wait),
        begun + _ns(event["dur"]),
        args.get("bytes"),
    )


def _slice(name: str, categories: str, begin: int, end: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": categories, "ts": _us(begin), "dur": _us(end - begin), "args": args}


def _metadata(rank: int, tid: int, name: str, args: Mapping[str, str | int]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "ts": 0, "pid": _pid(rank), "tid": tid, "args": args}


def _pid(rank: int) -> int:
    return rank + 1


def _rank(event: Mapping[str, Any]) -> int:
    return int(event["pid"]) - 1


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
