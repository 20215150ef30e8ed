"""One invocation of ``choros bench``: what it has measured so far, and where that goes."""

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
from choros.bench.report import Row, Table, absence_lines, check_writable, show, write_json
from choros.bench.run import Absence, Case, Effort, Outcome, hold

__all__ = ["ENOUGH_ROUNDS", "Session"]

#: With fewer a best one proves little.
ENOUGH_ROUNDS = 7


@final
class Session:
    """Contests are held within its block, the report is made after it.

    Args:
        plot: the picture to draw, if any.
        json_file: the file to write all figures to, if any.

    Attributes:
        rows: what has been measured.
        machine: where.

    Raises:
        ConfigError: a file cannot be written, or there is nothing to draw with.
    """

    def __init__(self, plot: Path | None, json_file: Path | None) -> None:
        check_writable("--plot", plot)
        check_writable("--json", json_file)
        if plot is not None:
            check_matplotlib()
        self.rows: list[Row] = []
        self.machine = machine()
        self._plot = plot
        self._json = json_file
        self._absences: dict[tuple[str, str], Absence] = {}
        self._rounds = ENOUGH_ROUNDS
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        self._progress = self._stack.enter_context(Progress())
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="choros-bench-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, trace)

    def hold(
        self, contenders: Sequence[Contender], cases: Sequence[Case], ranks: int, effort: Effort, about: str = ""
    ) -> Outcome[Case]:
        """A contest; see ``contest.hold``. ``about`` is shown before what is going on."""

        def say(text: str) -> None:
            self._progress.say(about + text)

        self._rounds = min(self._rounds, effort.rounds)
        outcome = hold(contenders, cases, ranks, effort, self._directory, say)
        for absence in outcome.absences:
            self._absences.setdefault((absence.name, absence.reason), absence)
        return outcome

    def report(self, tables: Sequence[Table], plot: Callable[[Path], None]) -> int:
        """Prints, draws and writes; returns the exit code."""
        for table in tables:
            show(table)
            click.echo()
        for line in absence_lines(self._absences.values()):
            click.echo(line)
        if self._rounds < ENOUGH_ROUNDS:
            click.echo(f"rounds: {self._rounds} are too few to compare contenders by; take {ENOUGH_ROUNDS} or more.")
        click.echo(f"machine: {machine_text(self.machine)}")
        if self._plot is not None and self.rows:
            plot(self._plot)
        if self._json is not None:
            write_json(self._json, self.machine, self.rows)
        return 0 if any(row.peer == CHOROS for row in self.rows) else 1
