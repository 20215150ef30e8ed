"""The record of a job as its page needs it, with times from the begin of the job on; and the pages: of a job, and of
two jobs side by side, with their main numbers, how these differ, and figures, drawn.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from choros.durable import unfinished
from choros.errors import ConfigError
from choros.observe.progress import PARTS, SERIES, RankProgress, limit_of
from choros.observe.verdict import GOODPUT, means_of, members_of
from choros.report import drawing
from choros.report.drawing import COLOURS, Point
from choros.wording import bytes_text, number_text, percent_text, seconds_text


@dataclass(frozen=True)
class Rank:
    """What a rank had done at ``times``, in seconds since the job began: ``series`` has a list for each number;
    ``progress``: in all.
    """

    number: int
    host: str
    pid: int
    times: Sequence[float]
    series: Mapping[str, Sequence[float]]
    progress: RankProgress

    @classmethod
    def of(cls, number: str, found: Mapping[str, Any], began: float) -> Rank:
        """That of a record's entry."""
        times = [float(each) - began for each in found["times"]]
        series = {name: [float(each) for each in found[name]] for name in SERIES}
        if any(len(each) != len(times) for each in series.values()):
            raise ValueError(f"rank {number} has lists of different lengths")
        last: dict[str, Any] = {name: values[-1] for name, values in series.items() if values}
        progress = RankProgress(
            int(number),
            **last,
            prompt_steps=int(found["prompt_steps"]),
            histogram=[int(each) for each in found["histogram"]],
            collectives={name: (int(calls), int(sent)) for name, (calls, sent) in found["collectives"].items()},
            last=str(found["last"]),
        )
        return cls(int(number), str(found["host"]), int(found["pid"]), times, series, progress)


@dataclass(frozen=True)
class WrittenRecord:
    """What a job has done; ``seconds``: how long it took, or has run. ``docs/report.md`` says what each name means."""

    command: Sequence[str]
    size: int
    began: float
    seconds: float
    code: int | None
    settings: Mapping[str, str]
    machine: Mapping[str, Any]
    goodput: Mapping[str, float] | None
    lines: Sequence[str]
    messages: Sequence[tuple[float, str]]
    ranks: Sequence[Rank]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> WrittenRecord:
        """That of a record as JSON has it; ``KeyError``, ``TypeError`` and others if it is none."""
        began = float(found["began"])
        ranks = [Rank.of(number, each, began) for number, each in found["ranks"].items()]
        lines = [str(each) for each in found["lines"]]
        messages = [(float(at) - began, str(text)) for at, text in found["messages"]]
        goodput = found["goodput"]
        latest = [0.0, *(each.times[-1] for each in ranks if each.times), *(at for at, _ in messages)]
        return cls(
            command=[str(each) for each in found["command"]],
            size=int(found["size"]),
            began=began,
            seconds=max(latest) if found["ended"] is None else max(0.0, float(found["ended"]) - began),
            code=found["code"],
            settings=dict(found["settings"]),
            machine=dict(found["machine"]),
            goodput=None if goodput is None else {name: float(goodput[name]) for name in ("seconds", *GOODPUT)},
            lines=lines,
            messages=[each for each in messages if not _is_verdict(each[1], lines)],
            ranks=sorted(ranks, key=lambda each: each.number),
        )


def _is_verdict(message: str, lines: Sequence[str]) -> bool:
    """Whether chorosrun has shown the verdict by it; the goodput's seconds were others then."""
    return message.removeprefix("chorosrun: ") in lines or message.startswith("chorosrun: goodput ")


#: How the texts of main numbers are made, unless by ``number_text``.
_TEXTS: Mapping[str, Callable[[float], str]] = {
    **dict.fromkeys(("time", "a step"), seconds_text),
    **dict.fromkeys(("goodput", *PARTS.values()), percent_text),
    **dict.fromkeys(("memory of a rank, at most", "given to collectives"), bytes_text),
}


def numbers_of(record: WrittenRecord) -> Mapping[str, float | None]:
    """The main numbers by name, if there are any: means over the ranks that made at least half of the steps."""
    progress = [rank.progress for rank in record.ranks]
    members = [each for each in members_of(progress) if each.seconds > 0]
    step, examples, shares = means_of(members) if members else (None, None, {})
    memory = max((each for rank in record.ranks for each in rank.series["memory"]), default=0.0)
    return {
        "time": record.seconds,
        "ranks": len(record.ranks),
        "steps": max((each.steps for each in progress), default=0),
        "a step": step,
        "steps/s": 1 / step if step else None,
        "examples/s": examples or None,
        **{text: shares.get(name) for name, text in PARTS.items()},
        "goodput": None if record.goodput is None else record.goodput["steps"],
        "memory of a rank, at most": memory or None,
        "given to collectives": sum(each[2] for each in collectives_of(record)) or None,
    }


def text_of(name: str, value: float | None) -> str:
    """The text of a main number."""
    return "–" if value is None else _TEXTS.get(name, number_text)(value)


def collectives_of(record: WrittenRecord) -> list[tuple[str, int, int]]:
    """The collectives of all ranks: names, how many there were, and their bytes; those with most bytes first."""
    total: dict[str, tuple[int, int]] = {}
    for rank in record.ranks:
        for name, (calls, sent) in rank.progress.collectives.items():
            before = total.get(name, (0, 0))
            total[name] = (before[0] + calls, before[1] + sent)
    return sorted(((name, *each) for name, each in total.items()), key=lambda each: (-each[2], each[0]))


def difference(name: str, before: float | None, after: float | None) -> str:
    """By how much the second job's number differs: in points, if it is a share.

    >>> difference("steps", 10.0, 12.5), difference("goodput", 0.5, 0.1)
    ('+25 %', '-40 points')
    """
    if before is None or after is None:
        return "–"
    if _TEXTS.get(name) is percent_text:
        return f"{100 * (after - before):+.0f} points"
    return f"{100 * (after / before - 1):+.0f} %" if before else "–"


def differences(first: WrittenRecord, second: WrittenRecord) -> list[tuple[str, str, str, str]]:
    """The main numbers that one of the two jobs has: its name, both, and by how much the second one differs."""
    pairs = zip(numbers_of(first).items(), numbers_of(second).values(), strict=True)
    rows = [(name, text_of(name, a), text_of(name, b), difference(name, a, b)) for (name, a), b in pairs]
    return [row for row in rows if not set(row[1:3]) <= {"–", "0", "0 %"}]


def page_of(record: WrittenRecord) -> str:
    """The page about a job."""
    numbers = numbers_of(record).items()
    return _rendered(
        "job.html",
        job=record,
        figures=figures_of(record),
        numbers={name: text_of(name, each) for name, each in numbers if each and _TEXTS.get(name) is not percent_text},
        ranks=shown_ranks(record),
        collectives=collectives_of(record),
    )


def comparison_of(jobs: Sequence[WrittenRecord], names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The page about two jobs; ``rows``: their ``differences``."""
    pairs = list(zip(*(figures_of(job) for job in jobs), strict=True))
    return _rendered("comparison.html", jobs=jobs, names=names, rows=rows, pairs=pairs)


def write_page(file: Path, page: str) -> None:
    """Writes a page; what is no text, such as names of files in other encodings, becomes question marks."""
    with unfinished(file) as name:
        name.write_text(page, encoding="utf-8", errors="replace")


def _rendered(template: str, **values: Any) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ConfigError("a report's page needs Jinja2: pip install 'choros[report]'") from error
    environment = Environment(
        loader=PackageLoader("choros.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds_text, "bytes": bytes_text, "date": _date, "command": shlex.join}
    return environment.get_template(template).render(values)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


#: With more ranks, those are drawn for which the others waited most.
_MOST_RANKS = 64
#: A line has at most so many points.
_MOST_POINTS = 150
#: The colours of what a step is spent on.
_COLOURS = dict(zip(PARTS, ("c0", "c1", "c4", "c5", "c3", "c6"), strict=True))
#: And of what the job's time is.
_GOODPUT_COLOURS = ("c0", "c7", "c1", "c3", "c6", "c2")


@dataclass(frozen=True)
class Figure:
    """A drawing as SVG, empty if there is nothing to draw; ``legend``: classes of colours, and what they mean."""

    title: str
    drawing: str
    caption: str
    legend: Sequence[tuple[str, str]] = ()


def figures_of(record: WrittenRecord) -> list[Figure]:
    """All figures, in the same order for each record."""
    ranks = shown_ranks(record)
    return [
        _goodput(record),
        _shares(ranks),
        _step_times(record, ranks),
        _waits(ranks, record.ranks),
        _histogram(record.ranks),
        _memory(record, ranks),
    ]


def shown_ranks(record: WrittenRecord) -> list[Rank]:
    """The ranks that are drawn, by number."""
    most = sorted(record.ranks, key=lambda each: -each.progress.prompt_steps)[:_MOST_RANKS]
    return sorted(most, key=lambda each: each.number)


def _goodput(record: WrittenRecord) -> Figure:
    title = "Goodput"
    if record.goodput is None:
        return Figure(title, "", "The job was too short: a verdict and the goodput need 20 steps and 10 s of them.")
    shares = {text: record.goodput[name] for name, text in GOODPUT.items()}
    shares["the rest"] = max(0.0, 1 - sum(shares.values()))
    coloured = zip(_GOODPUT_COLOURS, shares.items(), strict=True)
    parts = [(colour, text, share) for colour, (text, share) in coloured if share >= 0.005]
    legend = [(colour, f"{text} {percent_text(share)}") for colour, text, share in parts]
    label = f"Goodput {percent_text(shares['steps'])}: {', '.join(text for _, text in legend)}"
    caption = f"What the {seconds_text(record.seconds)} of the job were spent on; steps are what it is for."
    return Figure(title, drawing.bar(label, [(colour, share) for colour, _, share in parts]), caption, legend)


def _shares(ranks: Sequence[Rank]) -> Figure:
    title = "A step of each rank"
    members = [rank for rank in ranks if rank.progress.seconds > 0]
    if not members:
        return Figure(title, "", "No rank has made a step.")
    parts = []
    for name, text in PARTS.items():
        shares = [getattr(rank.progress, name) / rank.progress.seconds for rank in members]
        if max(shares) >= 0.005:
            parts.append((_COLOURS[name], text, shares))
    means = ", ".join(f"{text} {percent_text(sum(shares) / len(shares))}" for _, text, shares in parts)
    svg = drawing.columns(
        f"Shares of a step, by rank; on average {means}",
        [str(rank.number) for rank in members],
        [(colour, shares) for colour, _, shares in parts],
        percent_text,
    )
    return Figure(title, svg, "What the time of its steps was spent on.", [(colour, text) for colour, text, _ in parts])


def _step_times(record: WrittenRecord, ranks: Sequence[Rank]) -> Figure:
    points = {f"rank {rank.number}": step_times(rank) for rank in ranks}
    caption = "The mean time of the steps between two moments."
    return _over_time("Seconds of a step", points, seconds_text, record, caption)


def _memory(record: WrittenRecord, ranks: Sequence[Rank]) -> Figure:
    points = {f"rank {rank.number}": _memory_points(rank) for rank in ranks}
    return _over_time("Memory", points, bytes_text, record, "Of the rank's process, without its children.")


def _memory_points(rank: Rank) -> list[Point]:
    memory = rank.series["memory"]
    return [(rank.times[place], memory[place]) for place in _places(len(memory)) if memory[place] > 0]


def _over_time(
    title: str, points: dict[str, list[Point]], number: drawing.Text, record: WrittenRecord, caption: str
) -> Figure:
    drawn = {name: each for name, each in points.items() if each}
    values = [point[1] for each in drawn.values() for point in each if point]
    if not values:
        return Figure(title, "", "There are no numbers of it.")
    marks = sorted({round(at, 1) for at, _ in record.messages})
    label = f"{title} over time, by rank: from {number(min(values))} to {number(max(values))}"
    svg = drawing.lines(label, drawn, number, record.seconds, marks)
    if max(values) > drawing.highest(values):
        caption += f" What is beyond the drawing is up to {number(max(values))}."
    if marks:
        caption += " Dashed lines: messages, listed below."
    legend = [(f"c{place}", name) for place, name in enumerate(drawn)]
    if len(drawn) > COLOURS:
        of = f"{len(drawn)} of {len(record.ranks)}" if len(drawn) < len(record.ranks) else f"{len(drawn)}"
        legend = [("c0", f"each of {of} ranks")]
    return Figure(title, svg, caption, legend)


def step_times(rank: Rank) -> list[Point]:
    """The seconds of its steps, over time; a part of the line ends where another process has taken the rank's place."""
    points: list[Point] = []
    steps = seconds = 0.0
    for place in _places(len(rank.times)):
        made, spent = rank.series["steps"][place] - steps, rank.series["seconds"][place] - seconds
        if made > 0 and spent >= 0:
            points.append((rank.times[place], spent / made))
        elif made < 0:
            points.append(None)
        steps, seconds = rank.series["steps"][place], rank.series["seconds"][place]
    return points


def _places(number: int) -> list[int]:
    """Places of a list, evenly far apart, the last one among them."""
    return list(range(number - 1, -1, -max(1, math.ceil(number / _MOST_POINTS))))[::-1]


def _waits(ranks: Sequence[Rank], of: Sequence[Rank]) -> Figure:
    title = "Who waits for whom"
    if len(of) < 2 or not any(rank.progress.waiting for rank in of):
        return Figure(title, "", "No rank has waited for another one.")
    rows = waits(ranks)
    seconds, waiting, awaited = max(
        (value, ranks[i].number, ranks[j].number) for i, row in enumerate(rows) for j, value in enumerate(row)
    )
    caption = (
        "Each row: the seconds that a rank waited, for the rank of the column. An estimate: the seconds of waiting are "
        "measured, and divided among the others by the number of steps in which each was among the last."
    )
    label = f"Who waits for whom, in seconds, by rank: most, rank {waiting} for rank {awaited}, {seconds_text(seconds)}"
    svg = drawing.matrix(label, [str(rank.number) for rank in ranks], rows, seconds_text)
    return Figure(title, svg, caption)


def waits(ranks: Sequence[Rank]) -> list[list[float]]:
    """Seconds that ranks waited for each, estimated by the steps in which it was among the last; else equal parts."""
    prompt = [rank.progress.prompt_steps or 1e-9 for rank in ranks]
    rows = []
    for i, rank in enumerate(ranks):
        others = [0.0 if i == j else steps for j, steps in enumerate(prompt)]
        of_a_step = rank.progress.waiting / sum(others)
        rows.append([of_a_step * steps for steps in others])
    return rows


def _histogram(ranks: Sequence[Rank]) -> Figure:
    title = "How long steps took"
    counts = [
        sum(each) for each in zip(*(rank.progress.histogram for rank in ranks if rank.progress.histogram), strict=True)
    ]
    if not any(counts):
        return Figure(title, "", "No rank has made a step.")
    first = next(place for place, count in enumerate(counts) if count)
    end = max(place for place, count in enumerate(counts) if count) + 1
    names = [seconds_text(limit_of(place - 1)) for place in range(first, end)]
    most = names[max(range(first, end), key=counts.__getitem__) - first]
    label = f"Histogram of {sum(counts):,} steps of all ranks: most often from {most} on, at most from {names[-1]} on"
    svg = drawing.columns(label, names, [("c0", counts[first:end])], lambda each: f"{each:,.0f}" * (each % 1 == 0))
    caption = f"{sum(counts):,} steps of all ranks. Each column begins at its time, and ends at 1.26 times it."
    return Figure(title, svg, caption)
