"""Rows, tables and the JSON file: the output of a benchmark run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from choros.bench.contender import CHOROS
from choros.bench.figures import Ratios, Summary, format_seconds, ratios
from choros.bench.run import Skipped
from choros.errors import ConfigError

__all__ = [
    "ReportRow", "Table", "as_json", "check_writable", "compare", "plain_text", "show", "skipped_lines", "write_json",
]  # fmt: skip

_MEASURED = ("best", "median", "CPU")
_RATIOS = ("best÷", "median÷", "CPU÷")


@dataclass(frozen=True)
class ReportRow:
    """One contender's figures for one case.

    Attributes:
        bench: ``allreduce``, ``grouped``, ``train``, ``overhead`` or ``start``.
        peer: the contender's name; ``choros`` for ours.
        ranks: the number of ranks.
        summary: seconds for one allreduce, or for one training step.
        facts: the other keys that distinguish this row: ``bytes``, ``dtype``, ``framework``, ``model`` …
    """

    bench: str
    peer: str
    ranks: int
    summary: Summary
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the row of the JSON file.

        Example:
            >>> ReportRow("train", "choros", 2, Summary(1.0, 2.0, 3.0), {"batch": 8}).as_json()
            {'bench': 'train', 'peer': 'choros', 'ranks': 2, 'best_s': 1.0, 'median_s': 2.0, 'cpu_s': 3.0, 'batch': 8}
        """
        summary = {"best_s": self.summary.best_s, "median_s": self.summary.median_s, "cpu_s": self.summary.cpu_s}
        return {"bench": self.bench, "peer": self.peer, "ranks": self.ranks, **summary, **self.facts}


@dataclass(frozen=True)
class Table:
    """A table as text: names in the first column, figures in the others.

    Attributes:
        title: the heading of the table.
        columns: the headings of the columns.
        sections: for each section its label, a line above its rows, and the rows' cells.
        notes: lines below the table.
    """

    title: str
    columns: tuple[str, ...]
    sections: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    notes: tuple[str, ...] = ()


def compare(
    title: str,
    sections: Sequence[tuple[str, Sequence[ReportRow]]],
    *,
    throughput: bool = False,
    notes: Iterable[str] = (),
) -> Table:
    """Returns a table of contenders with the ratios of each peer's figures to choros'.

    Args:
        title: the heading of the table.
        sections: labels, each with the rows of the same case.
        throughput: whether to show the rows' ``images_per_s``.
        notes: lines below the table.
    """
    columns = ("", *(("images/s",) if throughput else ()), *_MEASURED, *_RATIOS)
    return Table(title, columns, tuple((label, _cells(rows, throughput)) for label, rows in sections), tuple(notes))


def _cells(rows: Sequence[ReportRow], throughput: bool) -> tuple[tuple[str, ...], ...]:
    ours = next((row.summary for row in rows if row.peer == CHOROS), None)
    cells: list[tuple[str, ...]] = []
    for row in rows:
        speed = (f"{row.facts['images_per_s']:,.0f}",) if throughput else ()
        seconds = map(format_seconds, (row.summary.best_s, row.summary.median_s, row.summary.cpu_s))
        ratio_cells = ("", "", "") if ours is None or row.peer == CHOROS else _ratio_cells(ratios(row.summary, ours))
        cells.append((row.peer, *speed, *seconds, *ratio_cells))
    return tuple(cells)


def _ratio_cells(relative: Ratios) -> tuple[str, str, str]:
    return f"{relative.best:.2f}", f"{relative.median:.2f}", f"{relative.cpu:.2f}"


def skipped_lines(skipped: Iterable[Skipped]) -> list[str]:
    """Returns a line with the reason for each contender that is missing from all or some of the tables.

    Example:
        >>> skipped_lines([Skipped("Horovod", "", "not installed (horovod)")])
        ['skipped: Horovod: not installed (horovod)']
    """
    return [f"skipped: {each.name}{each.since}: {each.reason}" for each in skipped]


def plain_text(table: Table) -> str:
    """Returns the table as plain text.

    Example:
        >>> print(plain_text(Table("Sums", ("", "best"), (("4 KiB", (("choros", "8 µs"),)),), ("A note.",))))
        Sums
                  best
        4 KiB
          choros  8 µs
        A note.
    """
    rows = [("  " + name, *figures) for _, section in table.sections for name, *figures in section]
    widths = [max(map(len, column)) for column in zip(table.columns, *rows, strict=True)]

    def line(name: str, *figures: str) -> str:
        cells = (cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True))
        return "  ".join((name.ljust(widths[0]), *cells)).rstrip()

    lines = [table.title, line(*table.columns)]
    for label, section in table.sections:
        lines += [label, *(line("  " + name, *figures) for name, *figures in section)]
    return "\n".join([*lines, *table.notes])


def show(table: Table, stream: TextIO = sys.stdout) -> None:
    """Prints the table: with ``rich`` on a terminal, if it is installed; as plain text otherwise."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(plain_text(table), file=stream)
        return
    if not stream.isatty():
        print(plain_text(table), file=stream)
        return
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
    console = Console(file=stream, highlight=False, markup=False)
    console.print(drawn)
    for note in table.notes:
        console.print(note)


def as_json(machine: Mapping[str, Any], rows: Sequence[ReportRow]) -> dict[str, Any]:
    """Returns the contents of the JSON file."""
    return {"machine": dict(machine), "rows": [row.as_json() for row in rows]}


def write_json(path: Path, machine: Mapping[str, Any], rows: Sequence[ReportRow]) -> None:
    """Writes ``path`` atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(as_json(machine, rows), indent=1) + "\n")
    os.replace(partial, path)


def check_writable(option: str, path: Path | None) -> None:
    """Raises a ``ConfigError`` if ``path`` cannot be written: before the measurements rather than after them."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{option} {path}: cannot be written. Give a file in an existing, writable directory.")
