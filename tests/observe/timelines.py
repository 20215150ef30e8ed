"""Timelines in tests: parts made by hand, and what every trace file must have."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from choros.observe.events import Kind
from choros.observe.timeline import Record, TimelinePart
from choros.trace.files import from_json
from choros.trace.trace import Trace

MS = 10**6


def part(
    rank: int,
    records: Sequence[Record],
    *,
    size: int = 2,
    host: str = "a",
    wall: int = 10**18,
    began: int = 0,
    mark_cycles: bool = False,
) -> TimelinePart:
    """The part of a rank, whose host's name is its clock's, too."""
    ended = records[-1].time if records else began
    return TimelinePart(rank, size, host, host, wall, began, mark_cycles, tuple(records), ended)


def record(kind: Kind, name: str, time: float, thread: int = 1, **details: Any) -> Record:
    """A record at ``time`` milliseconds."""
    return Record(kind, name, round(time * MS), thread, details)


def call(
    name: str, begun: float, matched: float | None, done: float | None, number: int, thread: int = 1, **details: Any
) -> list[Record]:
    """The records of a rank's call of a collective; times are milliseconds."""
    details = {"collective": "allreduce", **details}
    records = [record(Kind.COLLECTIVE_BEGUN, name, begun, thread, **details)]
    records += [] if matched is None else [record(Kind.COLLECTIVE_MATCHED, name, matched, thread, number=number)]
    records += [] if done is None else [record(Kind.COLLECTIVE_DONE, name, done, thread, bytes=8)]
    return records


def read(file: Path) -> Trace:
    """The trace in ``file``, which is checked."""
    text = file.read_text()
    check(json.loads(text))
    return from_json(text)


def check(data: dict[str, Any]) -> None:
    """Checks a trace in Chrome's format: its fields, names of processes and threads, and that slices nest."""
    events = data["traceEvents"]
    for event in events:
        assert event["ph"] in "MXi", event
        assert event["ts"] >= 0, event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert event["ph"] != "X" or event["dur"] >= 0, event
        # Exact in nanoseconds, so that slices nest however a reader converts microseconds.
        assert all(float(event.get(name, 0) * 1000).is_integer() for name in ("ts", "dur")), event
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == len(named)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert all(name.startswith(f"rank {pid - 1} on ") for pid, name in processes.items())
    slices = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in named, event
            assert event["pid"] in processes, event
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            slices[event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
    for thread in slices.values():
        open_until: list[int] = []
        for begin, end in sorted(thread, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "slices of one thread overlap"
            open_until.append(end)
