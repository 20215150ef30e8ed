"""Rows, tables, plots, drawn with matplotlib, and the JSON file: the output of a benchmark run."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from choros.bench.contender import CHOROS
from choros.bench.figures import AlphaBeta, allreduce_terms, fit, ratios
from choros.durable import is_special, unfinished
from choros.errors import ConfigError
from choros.frameworks import is_installed
from choros.observe.verdict import aligned
from choros.wording import bytes_text, count_text, seconds_text

T = TypeVar("T")
#: The type of options that name a file.
FILE = click.Path(dir_okay=False, path_type=Path)
#: One contender's figures for one case, in seconds per allreduce or step, as the JSON file has them (docs/bench.md).
Row = Mapping[str, Any]
_MEASURED = ("best", "median", "CPU")
_RATIOS = ("best÷", "median÷", "CPU÷")


def grouped(rows: Iterable[T], label: Callable[[T], str]) -> list[tuple[str, list[T]]]:
    """Returns the rows under their labels: the sections of a table."""
    sections: dict[str, list[T]] = {}
    for row in rows:
        sections.setdefault(label(row), []).append(row)
    return list(sections.items())


@dataclass(frozen=True)
class Table:
    """A table as text, names in the first column; a section: its label, a line above its rows, and their cells."""

    title: str
    columns: Sequence[str]
    sections: Sequence[tuple[str, Sequence[Sequence[str]]]]
    notes: Sequence[str] = ()


def compare(
    title: str,
    sections: Sequence[tuple[str, Sequence[Row]]],
    *,
    throughput: bool = False,
    notes: Sequence[str] = (),
) -> Table:
    """Returns a table of contenders with each peer's ratios to choros; all rows of a section have the same case."""
    columns = ("", *(("images/s",) if throughput else ()), *_MEASURED, *_RATIOS)
    return Table(title, columns, [(label, _cells(rows, throughput)) for label, rows in sections], notes)


def _cells(rows: Sequence[Row], throughput: bool) -> list[tuple[str, ...]]:
    ours = next((row for row in rows if row["peer"] == CHOROS), None)
    cells: list[tuple[str, ...]] = []
    for row in rows:
        speed = (images_per_s(row),) if throughput else ()
        relative = ["", "", ""]
        if ours is not None and row["peer"] != CHOROS:
            relative = [f"{ratio:.2f}" for ratio in ratios(row, ours)]
        cells.append((row["peer"], *speed, *seconds_of(row), *relative))
    return cells


def seconds_of(row: Row) -> tuple[str, str, str]:
    """Returns the cells of the seconds."""
    return seconds_text(row["best_s"]), seconds_text(row["median_s"]), seconds_text(row["cpu_s"])


def images_per_s(row: Row) -> str:
    """Returns the cell of the speed."""
    return f"{row['images_per_s']:,.0f}"


def plain_text(table: Table) -> str:
    """Returns the table as plain text.

    >>> print(plain_text(Table("Sums", ["", "best"], [("4 KiB", [("choros", "8 µs")])], ["A note."])))
    Sums
              best
    4 KiB
      choros  8 µs
    A note.
    """
    rows = [("  " + name, *figures) for _, section in table.sections for name, *figures in section]
    head, *body = aligned([table.columns, *rows])
    lines, below = [table.title, head], iter(body)
    for label, section in table.sections:
        lines += [label, *islice(below, len(section))]
    return "\n".join([*lines, *table.notes])


def show(table: Table) -> None:
    """Prints the table: with ``rich`` on a terminal, if it is installed; as plain text otherwise."""
    if not sys.stdout.isatty() or not is_installed("rich"):
        print(plain_text(table))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    names, *figures = table.columns
    drawn.add_column(names)
    for heading in figures:
        drawn.add_column(heading, justify="right", no_wrap=True)
    for label, section in table.sections:
        drawn.add_row(label, style="italic")
        for row in section:
            drawn.add_row(*row, style="bold" if row[0] == CHOROS else None)
        drawn.add_section()
    console = Console(highlight=False, markup=False)
    console.print(drawn)
    for note in table.notes:
        console.print(note)


def write_json(path: Path | None, value: Mapping[str, Any]) -> None:
    """Writes ``path`` atomically; ``None``: no file is wanted."""
    if path is None:
        return
    with unfinished(path) as name:
        name.write_text(json.dumps(value, indent=1) + "\n")


def check_writable(option: str, path: Path | None) -> None:
    """Raises a ``ConfigError`` if ``path`` cannot be written: before the measurements rather than after them."""
    if path is not None and (path.is_dir() or not os.access(path if is_special(path) else path.parent, os.W_OK)):
        raise ConfigError(f"{option} {path}: cannot be written. Give a file in an existing, writable directory.")


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


def fits(rows: Sequence[Row]) -> dict[int, AlphaBeta]:
    """Returns α and β of choros' allreduce for each number of ranks, 2 or more."""
    series = {ranks: ([allreduce_terms(ranks, n) for n in sizes], took) for ranks, sizes, took in _series(rows, CHOROS)}
    return {ranks: model for ranks, (terms, took) in series.items() if (model := fit(terms, took))}


def model_text(model: AlphaBeta, message: str, byte: str) -> str:
    """Formats α and β, with the names of what they are the times of.

    >>> model_text((2.5e-6, 1e-9), " a message", " a byte")
    'α = 2.5 µs a message, β = 1 ns a byte'
    """
    return f"α = {model[0] * 1e6:.3g} µs{message}, β = {model[1] * 1e9:.3g} ns{byte}"


def scaling_title(ranks: Sequence[int], cores: int) -> str:
    """Returns the title of the plot of several numbers of ranks.

    >>> scaling_title([1, 2, 4], cores=2)
    'allreduce by choros; 4 ranks share 2 cores'
    """
    oversubscribed = [str(number) for number in ranks if number > cores]
    share = f"; {' and '.join(oversubscribed)} ranks share {cores} cores" if oversubscribed else ""
    return f"allreduce by {CHOROS}{share}"


def plot_sizes(rows: Sequence[Row], path: Path, cores: int) -> None:
    """Plots time against bytes: for one number of ranks all contenders, for several choros and the fitted models."""
    figure, axes = new_figure()
    numbers = sorted({row["ranks"] for row in rows})
    if len(numbers) == 1:
        for peer in dict.fromkeys(row["peer"] for row in rows):
            for _, sizes, seconds in _series(rows, peer):
                axes.plot(sizes, seconds, marker="o", linewidth=2.5 if peer == CHOROS else 1, label=peer)
        axes.set_title(f"allreduce, {numbers[0]} ranks, best rounds")
    else:
        models = fits(rows)
        for ranks, sizes, seconds in _series(rows, CHOROS):
            (points,) = axes.plot(sizes, seconds, "o", label=count_text(ranks, "rank"))
            if model := models.get(ranks):
                line = np.array([allreduce_terms(ranks, size) for size in sizes]) @ model
                axes.plot(sizes, line, color=points.get_color(), label=f"  {model_text(model, '', '/byte')}")
        axes.set_title(scaling_title(numbers, cores))
        axes.text(0.98, 0.02, "lines: T = 2 lg p α + 2 (p−1)/p n β", transform=axes.transAxes, ha="right")
    axes.set(yscale="log", xlabel="bytes", ylabel="seconds")
    save(figure, path, {row["bytes"]: bytes_text(row["bytes"]) for row in rows}, rotation=45)


def save(figure: Any, path: Path, ticks: Mapping[int, str] = {}, rotation: int = 0) -> None:
    """Writes a figure with a legend, and these ``ticks`` on a logarithmic axis; the name's ending is the format."""
    (axes,) = figure.axes
    if ticks:
        axes.set_xscale("log")
        axes.set_xticks(sorted(ticks), [ticks[each] for each in sorted(ticks)], rotation=rotation)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with unfinished(path) as name:
        figure.savefig(name, dpi=150)


def plot_rows(sections: Sequence[tuple[str, Sequence[Row]]], path: Path, title: str) -> None:
    """Plots a bar for each contender's best round and a mark for its median, in one group per section."""
    figure, axes = new_figure()
    labels: list[str] = []
    for label, rows in sections:
        positions = range(len(labels), len(labels) + len(rows))
        axes.barh(positions, [row["best_s"] * 1e3 for row in rows], label=label)
        axes.plot([row["median_s"] * 1e3 for row in rows], positions, "k|", markersize=12)
        labels += [f"{row['peer']}, {count_text(row['ranks'], 'rank')}" for row in rows]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="milliseconds: best round (bar), median (mark)")
    save(figure, path)


def _series(rows: Sequence[Row], peer: str) -> list[tuple[int, list[int], list[float]]]:
    """Returns ``peer``'s best times for each number of ranks, as (ranks, sizes, seconds)."""
    series = []
    for ranks in sorted({row["ranks"] for row in rows}):
        chosen = [row for row in rows if (row["peer"], row["ranks"]) == (peer, ranks)]
        points = sorted((row["bytes"], row["best_s"]) for row in chosen)
        if points:
            series.append((ranks, [size for size, _ in points], [seconds for _, seconds in points]))
    return series


def new_figure() -> tuple[Any, Any]:
    """Returns a figure and its axes."""
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    figure = Figure(figsize=(9, 6), layout="constrained")
    return figure, figure.subplots()
