"""Rows, tables and the JSON file: the output of a benchmark run."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from choros.bench.contender import CHOROS
from choros.bench.figures import Summary, format_seconds, ratios
from choros.durable import is_special, unfinished
from choros.errors import ConfigError
from choros.frameworks import is_installed
from choros.observe.verdict import aligned

T = TypeVar("T")
_MEASURED = ("best", "median", "CPU")
_RATIOS = ("best÷", "median÷", "CPU÷")


@dataclass(frozen=True)
class ReportRow:
    """One contender's figures for one case, in seconds per allreduce or step; ``facts``: the row's other keys."""

    bench: str
    peer: str
    ranks: int
    summary: Summary
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the row of the JSON file.

        >>> ReportRow("train", "choros", 2, Summary(1.0, 2.0, 3.0), {"batch": 8}).as_json()
        {'bench': 'train', 'peer': 'choros', 'ranks': 2, 'best_s': 1.0, 'median_s': 2.0, 'cpu_s': 3.0, 'batch': 8}
        """
        return {"bench": self.bench, "peer": self.peer, "ranks": self.ranks, **asdict(self.summary), **self.facts}


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
    sections: Sequence[tuple[str, Sequence[ReportRow]]],
    *,
    throughput: bool = False,
    notes: Sequence[str] = (),
) -> Table:
    """Returns a table of contenders with each peer's ratios to choros; all rows of a section have the same case."""
    columns = ("", *(("images/s",) if throughput else ()), *_MEASURED, *_RATIOS)
    return Table(title, columns, [(label, _cells(rows, throughput)) for label, rows in sections], notes)


def _cells(rows: Sequence[ReportRow], throughput: bool) -> list[tuple[str, ...]]:
    ours = next((row.summary for row in rows if row.peer == CHOROS), None)
    cells: list[tuple[str, ...]] = []
    for row in rows:
        speed = (f"{row.facts['images_per_s']:,.0f}",) if throughput else ()
        relative = ["", "", ""]
        if ours is not None and row.peer != CHOROS:
            relative = [f"{ratio:.2f}" for ratio in ratios(row.summary, ours)]
        cells.append((row.peer, *speed, *seconds_of(row.summary), *relative))
    return cells


def seconds_of(summary: Summary) -> tuple[str, str, str]:
    """Returns the cells of a summary."""
    return format_seconds(summary.best_s), format_seconds(summary.median_s), format_seconds(summary.cpu_s)


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
