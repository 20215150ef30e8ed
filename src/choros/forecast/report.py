"""What ``choros forecast`` prints, writes and draws."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from choros.bench.cases import format_bytes
from choros.bench.figures import format_ranks, format_seconds
from choros.bench.report import Table, grouped, new_figure, save
from choros.forecast.costs import Machines
from choros.forecast.model import Failures, Forecast, best
from choros.forecast.workload import Workload


@dataclass(frozen=True)
class Outlook:
    """All forecasts of one job; ``steps``: of an epoch as recorded, 0 if unknown; ``price``: of an hour of a rank."""

    workload: Workload
    machines: Machines
    forecasts: tuple[Forecast, ...]
    steps: int = 0
    price: float | None = None
    failures: Failures | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns all of it, with the best setting of each number of ranks."""
        rows = [self._row(each) for each in self.forecasts]
        finite = [{name: None if each == math.inf else each for name, each in row.items()} for row in rows]
        return {
            "workload": asdict(self.workload),
            "machines": asdict(self.machines),
            "forecasts": finite,
            "best": {str(each.ranks): each.setting for each in self.best()},
        }

    def _row(self, each: Forecast) -> dict[str, Any]:
        row: dict[str, Any] = {**asdict(each), "step_s": each.step_s, "efficiency": each.efficiency}
        if self.steps:
            row["epoch_s"] = each.epoch_s(self.workload, self.steps)
            if self.price is not None:
                row["epoch_cost"] = each.cost(self.workload, self.steps, self.price)
        if self.failures is not None:
            row["with_restarts"] = self.failures.restarting(each.ranks)
            row["in_place"] = self.failures.in_place(each.ranks, each.step_s)
        return row

    def sections(self) -> list[tuple[str, list[Forecast]]]:
        """The forecasts of each number of ranks."""
        return grouped(self.forecasts, lambda each: format_ranks(each.ranks))

    def best(self) -> list[Forecast]:
        """The best forecast of each number of ranks."""
        return [best(each) for _, each in self.sections()]

    def sentence(self) -> str:
        """Names the best setting of each number of ranks."""
        parts = [f"{each.setting} on {format_ranks(each.ranks)} ({each.efficiency:.0%})" for each in self.best()]
        return f"Best, with the speed of a rank against one alone: {', '.join(parts)}."

    def table(self) -> Table:
        """The table that is printed."""
        heads = ["", "step", "compute", "stragglers", "exchange", "efficiency"]
        heads += ["epoch"] if self.steps else []
        heads += ["cost"] if self.steps and self.price is not None else []
        heads += ["with restarts", "in place"] if self.failures else []
        sections = [(label, [self._cells(each) for each in group]) for label, group in self.sections()]
        return Table(self._title(), heads, sections, self._notes())

    def _cells(self, each: Forecast) -> list[str]:
        row = self._row(each)
        seconds = (each.step_s, each.compute_s, each.straggler_s, each.exchange_s)
        cells = [each.setting, *map(format_seconds, seconds), f"{each.efficiency:.0%}"]
        cells += [_long(row["epoch_s"])] if "epoch_s" in row else []
        cells += [f"{row['epoch_cost']:.2f}"] if "epoch_cost" in row else []
        cells += [f"{each.efficiency / row[name]:.0%}" for name in ("with_restarts", "in_place") if name in row]
        return cells

    def _title(self) -> str:
        work = self.workload
        count = len(work.buckets)
        buckets = f", in {count} buckets" if count > 1 else ""
        return (
            f"recorded on {format_ranks(work.ranks)}: {format_seconds(work.compute_s)} of computation a step, "
            f"{format_bytes(work.nbytes)} of gradients{buckets}"
        )

    def _notes(self) -> list[str]:
        links = (("between hosts", self.machines.between), ("within a host", self.machines.within))
        notes = [
            f"{where}: {link.name}: {link.bytes_per_s * 8 / 1e9:.3g} Gbit/s, {link.latency_s * 1e6:.3g} µs"
            for where, link in links
        ]
        notes.append(
            "A rank keeps its batch size: more ranks make fewer steps. power_sgd and DiLoCo change what is learnt."
        )
        if self.failures is not None:
            notes.append(
                "with restarts, in place: the efficiency with failures, from checkpoints and as choros recovers."
            )
        return [*notes, self.sentence()]


def _long(seconds: float) -> str:
    return format_seconds(seconds) if seconds < 60 else str(timedelta(seconds=round(seconds)))


def plot(outlook: Outlook, path: Path) -> None:
    """Draws the efficiency of each setting against the number of ranks."""
    figure, axes = new_figure()
    for name, points in grouped(outlook.forecasts, lambda each: each.setting):
        axes.plot([each.ranks for each in points], [each.efficiency for each in points], marker="o", label=name)
    ticks: Sequence[int] = sorted({each.ranks for each in outlook.forecasts})
    axes.set(xscale="log", xlabel="ranks", ylabel="speed of a rank, against one alone", ylim=(0, 1.05))
    axes.set_title(f"forecast: {outlook.machines.between.name} between hosts")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path)
