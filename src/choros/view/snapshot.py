"""What is shown of a job at one time, as texts, from its record (``docs/report.md``) and an earlier one. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from choros import durations
from choros.observe.progress import PARTS
from choros.observe.verdict import aligned, tells_examples
from choros.wording import bytes_text, count_text, without_controls

Record = Mapping[str, Any]
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RankView:
    """A rank: its rates at last, the ``shares`` of its time by the names of ``PARTS``, empty without steps; bytes."""

    number: int
    host: str
    steps: int = 0
    steps_per_second: float = 0.0
    examples_per_second: float = 0.0
    shares: Mapping[str, float] | None = None
    memory: int = 0


@dataclass(frozen=True)
class JobView:
    """A job: what runs, where and since when; how far ``fit`` is, in words, and as a share, 0 if it is not known; the
    values of each of its ``metrics`` over time, the lines of its verdict, messages and output.
    """

    title: str
    fit: str
    done: float
    ranks: tuple[RankView, ...]
    metrics: Mapping[str, tuple[float, ...]]
    verdict: tuple[str, ...]
    messages: tuple[str, ...]
    output: tuple[str, ...]

    @property
    def steps_per_second(self) -> float:
        """Those of the job: ranks make steps together."""
        return max((each.steps_per_second for each in self.ranks), default=0.0)

    @property
    def examples_per_second(self) -> float:
        """Those of all ranks."""
        return sum(each.examples_per_second for each in self.ranks)


def view_of(record: Record, now: float, earlier: Record | None = None) -> JobView:
    """What is shown of ``record``; rates are those since the ``earlier`` one, or of the last seconds."""
    ranks = [(int(number), rank) for number, rank in record["ranks"].items()]
    newest = max((rank["times"][-1] for _, rank in ranks if rank["times"]), default=0.0)
    older = {} if earlier is None else earlier["ranks"]
    fit, done = _fit_of(record["metrics"])
    return JobView(
        title=_title(record, now),
        fit=fit,
        done=done,
        ranks=tuple(_rank_of(number, rank, older.get(str(number)), newest) for number, rank in ranks),
        metrics=_metrics_of(record["metrics"]),
        verdict=tuple(record["lines"]),
        messages=tuple(without_controls(text) for _, text in record["messages"]),
        output=tuple(record["output"]),
    )


def _title(record: Record, now: float) -> str:
    hosts, size, code = len({rank["host"] for rank in record["ranks"].values()}), record["size"], record["code"]
    where = f" on {hosts} hosts" if hosts > 1 else ""
    end = "" if code is None else f", ended with exit code {code}"
    took = duration((record["ended"] or now) - record["began"])
    command = without_controls(" ".join(" ".join(record["command"]).split()))
    return f"{count_text(size, 'rank')}{where}, {took}{end}: {command}"


def _rank_of(number: int, rank: Record, earlier: Record | None, newest: float) -> RankView:
    """One that sends nothing any more makes no steps: it has ended, or is lost."""
    times: Sequence[float] = rank["times"]
    if not times:
        return RankView(number, rank["host"])
    first = max((place for place, at in enumerate(times) if at <= times[-1] - durations.VIEW_RECENT), default=0)
    names = ("steps", "examples", "seconds", *(each for each in PARTS if each != "computing"))
    began, before = times[first], {name: rank[name][first] for name in names}
    if earlier is not None and earlier["times"] and began < earlier["times"][-1] < times[-1]:
        began, before = earlier["times"][-1], {name: earlier[name][-1] for name in names}
    whole = {name: rank[name][-1] for name in names}
    done = {name: whole[name] - before[name] for name in names}
    elapsed = times[-1] - began
    if not tells_examples(whole["examples"], whole["steps"]):
        done["examples"] = 0.0
    runs = elapsed > 0 and newest - times[-1] < durations.VIEW_RECENT
    return RankView(
        number,
        rank["host"],
        rank["steps"][-1],
        done["steps"] / elapsed if runs else 0.0,
        done["examples"] / elapsed if runs else 0.0,
        _shares(done if done["seconds"] > 0 else whole),
        rank["memory"][-1],
    )


def _shares(done: Mapping[str, float]) -> Mapping[str, float] | None:
    seconds = done["seconds"]
    if seconds <= 0:
        return None
    spent = {name: min(1.0, max(0.0, done[name] / seconds)) for name in PARTS if name in done}
    return {"computing": max(0.0, 1.0 - sum(spent.values())), **spent}


def _fit_of(moments: Sequence[Record]) -> tuple[str, float]:
    """How far the last ``fit`` is: time is left as what has been done until now took."""
    shares = [_done(each) for each in moments]
    if not shares:
        return "", 0.0
    first = max((place for place in range(1, len(shares)) if shares[place] < shares[place - 1]), default=0)
    took, done = moments[-1]["time"] - moments[first]["time"], shares[-1] - shares[first]
    left = took * (1.0 - shares[-1]) / done if done > 0 else None
    return progress(moments[-1], shares[-1], left), shares[-1]


def _done(moment: Record) -> float:
    epoch, epochs, batch, batches = _position(moment)
    return min(1.0, (epoch - 1 + (batch / batches if batches else 0.0)) / epochs) if epoch and epochs else 0.0


def _position(moment: Record) -> list[int]:
    """0: not known."""
    return [moment.get(name, 0) for name in ("epoch", "epochs", "batch", "batches")]


def _metrics_of(moments: Sequence[Record]) -> Mapping[str, tuple[float, ...]]:
    """The values by name, those that are not finite as NaN; the loss first."""
    names = dict.fromkeys(name for each in reversed(moments) for name in each["logs"])
    ordered = sorted(names, key=lambda name: (name != "loss", name != "val_loss"))
    return {
        without_controls(name): tuple(
            float("nan") if (value := each["logs"][name]) is None else value for each in moments if name in each["logs"]
        )
        for name in ordered
    }


def progress(moment: Record, done: float, left: float | None) -> str:
    """How far ``fit`` is; ``left``: seconds, if they are known.

    >>> progress({"epoch": 2, "epochs": 5, "batch": 120, "batches": 200}, 0.32, 130.4)
    'epoch 2 of 5, batch 120 of 200, 32 %, 2:10 left'
    """
    epoch, epochs, batch, batches = _position(moment)
    parts = [f"epoch {epoch}" + (f" of {epochs}" if epochs else "")]
    parts += [f"batch {batch}" + (f" of {batches}" if batches else "")]
    parts += [f"{math.floor(100 * done)} %"] if epochs else []
    parts += [] if left is None or done >= 1 else [f"{duration(left)} left"]
    return ", ".join(parts)


def rates(view: JobView) -> str:
    """Steps and examples of the whole job."""
    examples = f", {rate(view.examples_per_second)} examples/s" if view.examples_per_second else ""
    return f"{rate(view.steps_per_second)} steps/s{examples}"


def rate(number: float) -> str:
    """A number in a second.

    >>> rate(0.123), rate(12.34), rate(43210.9)
    ('0.12', '12.3', '43,211')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(59.6), duration(7261)
    ('1:00', '2:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bar(share: float, width: int) -> str:
    """A bar of ``width`` cells, of which a share is full.

    >>> bar(0.5, 5)
    '██▌  '
    """
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)


def cells(shares: Mapping[str, float], width: int) -> Mapping[str, int]:
    """How many of ``width`` cells each part has: in all exactly so many.

    >>> cells({"computing": 0.5, "waiting": 0.5}, 5)
    {'computing': 3, 'waiting': 2}
    """
    total, ends, ended = sum(shares.values()), [0], 0.0
    for share in shares.values():
        ended += share
        ends.append(math.floor(width * ended / total + 0.5))
    return {name: ends[place + 1] - ends[place] for place, name in enumerate(shares)}


def curve(values: Sequence[float], width: int) -> str:
    """The values over time as a line of at most ``width`` characters, of which each is the mean of some.

    >>> curve([4, 3, 2, 1], 4), curve([1, 1, 2, 2], 2), curve([5], 4), curve([float("nan"), 1], 2)
    ('█▆▃▁', '▁█', '▁', '×▁')
    """
    width = min(width, len(values))
    edges = [round(place * len(values) / width) for place in range(width + 1)] if width else []
    means = [fmean(values[begin:end]) for begin, end in pairwise(edges)]
    finite = [each for each in means if math.isfinite(each)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    highest = len(_HEIGHTS) - 1
    return "".join(
        _HEIGHTS[min(highest, round(highest * (each - low) / span))] if math.isfinite(each) else "×" for each in means
    )


def table(view: JobView) -> str:
    """All of it as plain lines, for a pipe."""
    lines = [view.title]
    lines += [view.fit] if view.fit else []
    lines += [rates(view)]
    lines += [", ".join(f"{name} {values[-1]:.4g}" for name, values in view.metrics.items())] if view.metrics else []
    rows = [["rank", "host", "steps", "steps/s", "examples/s", *PARTS, "memory"]]
    for rank in view.ranks:
        shares = [f"{rank.shares[name]:.0%}" if rank.shares else "-" for name in PARTS]
        examples = rate(rank.examples_per_second) if rank.examples_per_second else "-"
        counts = [str(rank.steps), rate(rank.steps_per_second), examples]
        rows.append([str(rank.number), rank.host, *counts, *shares, bytes_text(rank.memory)])
    lines += [*aligned(rows, left=()), *view.verdict, *view.messages[-5:], *view.output[-5:]]
    return "\n".join(lines)
