"""The figures of a page: what a record's numbers say, drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from choros.observe.progress import limit_of
from choros.observe.stragglers import PARTS
from choros.observe.verdict import percent_text
from choros.report import drawing
from choros.report.drawing import COLOURS, Point, bytes_text, seconds_text
from choros.report.record import Rank, WrittenRecord

#: With more ranks, those are drawn for which the others waited most.
_MOST_RANKS = 64
#: A line has at most so many points.
_MOST_POINTS = 150
#: The colours of what a step is spent on.
_COLOURS = dict(zip(PARTS, ("c0", "c1", "c4", "c5", "c3", "c6"), strict=True))
_GOODPUT = (
    ("steps", "c0", "steps"),
    ("start", "c7", "start"),
    ("pauses", "c1", "between epochs"),
    ("commits", "c3", "commits"),
    ("recovery", "c6", "recovery from lost ranks"),
    ("rest", "c2", "the rest"),
)


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
    shares = {name: record.goodput.get(name, 0.0) for name, _, _ in _GOODPUT}
    shares["rest"] = max(0.0, 1 - sum(shares.values()))
    parts = [(colour, text, shares[name]) for name, colour, text in _GOODPUT if shares[name] >= 0.005]
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
