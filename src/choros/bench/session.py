"""One invocation of ``choros bench``: the rows measured so far, and their output."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import final

import click

from choros.bench.contender import CHOROS, Contender
from choros.bench.machine import machine, machine_text
from choros.bench.plot import check_matplotlib
from choros.bench.progress import Progress
from choros.bench.report import ReportRow, Table, check_writable, show, skipped_lines, write_json
from choros.bench.run import Case, Effort, RunResult, Skipped, run_contenders
from choros.bench.startup import StartCase, run_starts

__all__ = ["ENOUGH_ROUNDS", "BenchSession"]

#: With fewer rounds, the best one proves little.
ENOUGH_ROUNDS = 7


@final
class BenchSession:
    """Measures within its ``with`` block; reports after it.

    Args:
        plot: the image file to draw, if any.
        json_file: the file to write all figures to, if any.

    Attributes:
        rows: all rows measured so far.
        machine: the description of this machine.

    Raises:
        ConfigError: a file cannot be written, or matplotlib is needed and not installed.
    """

    def __init__(self, plot: Path | None, json_file: Path | None) -> None:
        check_writable("--plot", plot)
        check_writable("--json", json_file)
        if plot is not None:
            check_matplotlib()
        self.rows: list[ReportRow] = []
        self.machine = machine()
        self._plot = plot
        self._json = json_file
        self._skipped: dict[tuple[str, str], Skipped] = {}
        self._rounds = ENOUGH_ROUNDS
        self._stack = ExitStack()

    def __enter__(self) -> BenchSession:
        self._progress = self._stack.enter_context(Progress())
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="choros-bench-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, trace)

    def run(
        self, contenders: Sequence[Contender], cases: Sequence[Case], ranks: int, effort: Effort, about: str = ""
    ) -> RunResult[Case]:
        """Measures the contenders; see ``run.run_contenders``. ``about`` is a prefix of the progress lines."""

        def show_progress(text: str) -> None:
            self._progress.show(about + text)

        return self._noted(
            effort.rounds, run_contenders(contenders, cases, ranks, effort, self._directory, show_progress)
        )

    def run_starts(
        self, cases: Sequence[StartCase], names: Sequence[str], ranks: int, rounds: int
    ) -> RunResult[StartCase]:
        """Measures the start of the contenders in ``names``; see ``startup.run_starts``."""
        return self._noted(rounds, run_starts(cases, names, ranks, rounds, self._progress.show))

    def _noted(self, rounds: int, result: RunResult[Case]) -> RunResult[Case]:
        """Returns ``result``, after recording its skipped contenders for the report."""
        self._rounds = min(self._rounds, rounds)
        for skipped in result.skipped:
            self._skipped.setdefault((skipped.name, skipped.reason), skipped)
        return result

    def report(self, tables: Sequence[Table], plot: Callable[[Path], None]) -> int:
        """Prints the tables, draws the plot and writes the JSON file, where requested; returns the exit code."""
        for table in tables:
            show(table)
            click.echo()
        for line in skipped_lines(self._skipped.values()):
            click.echo(line)
        if self._rounds < ENOUGH_ROUNDS:
            click.echo(f"--rounds {self._rounds}: too few for a comparison; use {ENOUGH_ROUNDS} or more.")
        click.echo(f"machine: {machine_text(self.machine)}")
        if self._plot is not None and self.rows:
            plot(self._plot)
        if self._json is not None:
            write_json(self._json, self.machine, self.rows)
        return 0 if any(row.peer == CHOROS for row in self.rows) else 1
