"""Plots of the measured figures, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from choros.bench.cases import format_bytes
from choros.bench.contender import CHOROS
from choros.bench.figures import AlphaBeta, fit, format_ranks
from choros.bench.report import ReportRow, check_writable
from choros.durable import unfinished
from choros.errors import ConfigError


def check_files(plot: Path | None, json_file: Path | None) -> None:
    """Raises a ``ConfigError`` if a file that is wanted cannot be written, or matplotlib is not installed for one."""
    check_writable("--plot", plot)
    check_writable("--json", json_file)
    if plot is None:
        return
    try:
        figure, _ = new_figure()
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'choros[bench]'") from error
    endings = sorted(figure.canvas.get_supported_filetypes())
    if plot.suffix.lower().removeprefix(".") not in endings:
        raise ConfigError(f"--plot {plot}: the name of a picture ends in one of .{', .'.join(endings)}.")


def fits(rows: Sequence[ReportRow]) -> list[AlphaBeta]:
    """Returns the fitted α-β model of choros' allreduce for each number of ranks, 2 or more."""
    return [model for ranks, sizes, seconds in _series(rows, CHOROS) if (model := fit(ranks, sizes, seconds))]


def scaling_title(ranks: Sequence[int], cores: int) -> str:
    """Returns the title of the plot of several numbers of ranks.

    >>> scaling_title([1, 2, 4], cores=2)
    'allreduce by choros; 4 ranks share 2 cores'
    """
    oversubscribed = [str(number) for number in ranks if number > cores]
    share = f"; {' and '.join(oversubscribed)} ranks share {cores} cores" if oversubscribed else ""
    return f"allreduce by {CHOROS}{share}"


def plot_sizes(rows: Sequence[ReportRow], path: Path, cores: int) -> None:
    """Plots time against bytes: for one number of ranks all contenders, for several choros and the fitted models."""
    figure, axes = new_figure()
    numbers = sorted({row.ranks for row in rows})
    if len(numbers) == 1:
        for peer in dict.fromkeys(row.peer for row in rows):
            for _, sizes, seconds in _series(rows, peer):
                axes.plot(sizes, seconds, marker="o", linewidth=2.5 if peer == CHOROS else 1, label=peer)
        axes.set_title(f"allreduce, {numbers[0]} ranks, best rounds")
    else:
        models = {model.ranks: model for model in fits(rows)}
        for ranks, sizes, seconds in _series(rows, CHOROS):
            (points,) = axes.plot(sizes, seconds, "o", label=format_ranks(ranks))
            if model := models.get(ranks):
                label = f"  α = {model.alpha_s * 1e6:.3g} µs, β = {model.beta_s * 1e9:.3g} ns/byte"
                axes.plot(sizes, [model.seconds(size) for size in sizes], color=points.get_color(), label=label)
        axes.set_title(scaling_title(numbers, cores))
        axes.text(0.98, 0.02, "lines: T = 2 lg p α + 2 (p−1)/p n β", transform=axes.transAxes, ha="right")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
    ticks = sorted({row.facts["bytes"] for row in rows})
    axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Writes a figure, in the format that the name's ending says."""
    with unfinished(path) as name:
        figure.savefig(name, dpi=150)


def plot_rows(sections: Sequence[tuple[str, Sequence[ReportRow]]], path: Path, title: str) -> None:
    """Plots a bar for each contender's best round and a mark for its median, in one group per section."""
    figure, axes = new_figure()
    labels: list[str] = []
    for label, rows in sections:
        positions = range(len(labels), len(labels) + len(rows))
        axes.barh(positions, [row.summary.best_s * 1e3 for row in rows], label=label)
        axes.plot([row.summary.median_s * 1e3 for row in rows], positions, "k|", markersize=12)
        labels += [f"{row.peer}, {format_ranks(row.ranks)}" for row in rows]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="milliseconds: best round (bar), median (mark)")
    axes.legend(fontsize="small")
    save(figure, path)


def _series(rows: Sequence[ReportRow], peer: str) -> list[tuple[int, list[int], list[float]]]:
    """Returns ``peer``'s best times for each number of ranks, as (ranks, sizes, seconds)."""
    series = []
    for ranks in sorted({row.ranks for row in rows}):
        chosen = [row for row in rows if (row.peer, row.ranks) == (peer, ranks)]
        points = sorted((row.facts["bytes"], row.summary.best_s) for row in chosen)
        if points:
            series.append((ranks, [size for size, _ in points], [seconds for _, seconds in points]))
    return series


def new_figure() -> tuple[Any, Any]:
    """Returns a figure and its axes."""
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    figure = Figure(figsize=(9, 6), layout="constrained")
    return figure, figure.subplots()
