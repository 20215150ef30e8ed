"""What is shown of a job at one time: from its record (``docs/report.md``), and one that is older. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros import durations
from choros.observe.stragglers import PARTS
from choros.observe.verdict import tells_examples

Record = Mapping[str, Any]


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
class FitView:
    """How far ``fit`` is; 0: not known. ``done``: the share; ``left``: seconds, as those until now went."""

    epoch: int
    epochs: int
    batch: int
    batches: int
    done: float
    left: float | None


@dataclass(frozen=True)
class JobView:
    """A job: the values of each of its ``metrics`` over time, the lines of its verdict, messages and output."""

    command: str
    size: int
    seconds: float
    code: int | None
    fit: FitView | None
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
    return JobView(
        command=" ".join(" ".join(record["command"]).split()),
        size=record["size"],
        seconds=(record["ended"] or now) - record["began"],
        code=record["code"],
        fit=_fit_of(record["metrics"]),
        ranks=tuple(_rank_of(number, rank, older.get(str(number)), newest) for number, rank in ranks),
        metrics=_metrics_of(record["metrics"]),
        verdict=tuple(record["lines"]),
        messages=tuple(text for _, text in record["messages"]),
        output=tuple(record["output"]),
    )


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


def _fit_of(moments: Sequence[Record]) -> FitView | None:
    """How far the last ``fit`` is: time is left as what has been done until now took."""
    shares = [_done(each) for each in moments]
    if not shares:
        return None
    first = max((place for place in range(1, len(shares)) if shares[place] < shares[place - 1]), default=0)
    took, done = moments[-1]["time"] - moments[first]["time"], shares[-1] - shares[first]
    left = took * (1.0 - shares[-1]) / done if done > 0 else None
    return FitView(**_position(moments[-1]), done=shares[-1], left=left)


def _position(moment: Record) -> dict[str, int]:
    return {name: moment.get(name, 0) for name in ("epoch", "epochs", "batch", "batches")}


def _done(moment: Record) -> float:
    epoch, epochs, batch, batches = _position(moment).values()
    return min(1.0, (epoch - 1 + (batch / batches if batches else 0.0)) / epochs) if epoch and epochs else 0.0


def _metrics_of(moments: Sequence[Record]) -> Mapping[str, tuple[float, ...]]:
    """The values by name, those that are not finite as NaN; the loss first."""
    names = dict.fromkeys(name for each in reversed(moments) for name in each["logs"])
    ordered = sorted(names, key=lambda name: (name != "loss", name != "val_loss"))
    return {
        name: tuple(
            float("nan") if (value := each["logs"][name]) is None else value for each in moments if name in each["logs"]
        )
        for name in ordered
    }
