"""``choros bench start``: the time from a command to its end, for programs that do next to nothing.

Other commands keep their contenders alive; here each trial starts processes, runs them and waits for their end.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from choros.bench.contender import CHOROS
from choros.bench.figures import Trial, summarise
from choros.bench.report import ReportRow, Table, compare
from choros.bench.run import RunResult, Skipped, rotated
from choros.bench.start import LaunchCommand, Starter, chorosrun, mpirun, torchrun
from choros.launch.processes.parent_death_guard import die_with_parent

__all__ = ["CASES", "Program", "StartCase", "measure", "rows", "run_starts", "sections", "table"]

#: A trial that takes longer has failed.
_MOST_SECONDS = 120.0
_REASON_LENGTH = 300

_NOTHING = "pass"
_CHOROS = """
import numpy, choros
from choros.comm import Reduction, global_process_set
choros.init()
assert global_process_set.communicator.allreduce(numpy.ones(3), Reduction.SUM)[0] == choros.size()
"""
_MPI4PY = """
import numpy
from mpi4py import MPI
numbers = numpy.ones(3)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, numbers)
assert numbers[0] == MPI.COMM_WORLD.Get_size()
"""
_TORCH = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(3)
dist.all_reduce(numbers)
assert numbers[0] == dist.get_world_size()
dist.destroy_process_group()
"""


def _torchrun(ranks: int, argv: Sequence[str]) -> list[LaunchCommand]:
    """torchrun for Python's arguments; without ``--no-python`` it accepts only a script or a module."""
    return torchrun(ranks, ["--no-python", sys.executable, *argv])


def _python(_ranks: int, argv: Sequence[str]) -> list[LaunchCommand]:
    return [LaunchCommand((sys.executable, *argv))]


@dataclass(frozen=True)
class Program:
    """The program that one contender runs in a case.

    Attributes:
        contender: its name in the tables.
        start: returns the command with which its users start it.
        code: the Python code.
        needs: modules that must be installed.
    """

    contender: str
    start: Starter
    code: str
    needs: tuple[str, ...] = ()

    def command(self, ranks: int) -> LaunchCommand:
        """The command that runs it."""
        (command,) = self.start(ranks, ["-c", self.code])
        return command


@dataclass(frozen=True)
class StartCase:
    """A case: programs that do the same work, each with its contender's launcher or library.

    Attributes:
        name: the case's, in the tables and in the JSON file.
        programs: the programs, choros' first.
        single: whether they run in a single process, whatever the number of ranks.
    """

    name: str
    programs: tuple[Program, ...]
    single: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """The keys that its rows of the JSON file have besides the common ones."""
        return {"case": self.name}

    def __str__(self) -> str:
        return self.name


CASES = (
    StartCase(
        "python -c pass",
        (
            Program(CHOROS, chorosrun, _NOTHING),
            Program("mpirun", mpirun, _NOTHING),
            Program("torchrun", _torchrun, _NOTHING, ("torch",)),
        ),
    ),
    StartCase(
        "a first allreduce of 3 numbers",
        (
            Program(CHOROS, chorosrun, _CHOROS),
            Program("mpi4py", mpirun, _MPI4PY, ("mpi4py",)),
            Program("torch Gloo", _torchrun, _TORCH, ("torch",)),
        ),
    ),
    StartCase(
        "import",
        (
            Program(CHOROS, _python, "import choros"),
            Program("choros, a first use", _python, "import choros; choros.init"),
            Program("numpy", _python, "import numpy"),
        ),
        single=True,
    ),
)


def measure(command: LaunchCommand) -> Trial:
    """Runs ``command`` to its end; returns its wall time and the CPU time of all its processes that were waited for.

    Raises:
        RuntimeError: the command failed.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        command.argv,
        env={**os.environ, **command.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=partial(die_with_parent, os.getpid()),
    ) as process:
        before = _cpu_seconds()
        try:
            _, errors = process.communicate(timeout=_MOST_SECONDS)
        except BaseException:
            process.terminate()  # a launcher ends its ranks
            raise
    seconds = time.perf_counter() - began
    if process.returncode != 0:
        lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
        raise RuntimeError((lines or [f"failed with exit code {process.returncode}"])[-1][:_REASON_LENGTH])
    return Trial(seconds, _cpu_seconds() - before)


def _cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def run_starts(
    cases: Sequence[StartCase], names: Sequence[str], ranks: int, rounds: int, show_progress: Callable[[str], None]
) -> RunResult[StartCase]:
    """Measures all cases, the programs of each in interleaved rounds; the first round is not counted.

    Args:
        cases: the cases to run, in this order.
        names: the contenders to measure.
        ranks: the number of ranks.
        rounds: the number of trials of each program.
        show_progress: called with a line of text before each trial.
    """
    result: RunResult[StartCase] = RunResult()
    for case in cases:
        trials: dict[Program, list[Trial]] = {}
        for program in (each for each in case.programs if each.contender in names):
            missing = [module for module in program.needs if importlib.util.find_spec(module) is None]
            if missing:
                reason = f"not installed ({', '.join(missing)})"
                result.skipped.append(Skipped(program.contender, f", {case}", reason))
            else:
                trials[program] = []
        for number in range(rounds + 1):
            for program in rotated(list(trials), number):
                show_progress(f"{case}: round {number} of {rounds}, {program.contender}")
                try:
                    trials[program].append(measure(program.command(ranks)))
                except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                    result.skipped.append(Skipped(program.contender, f", {case}", str(error)))
                    del trials[program]
        for program, program_trials in trials.items():
            result.summaries[case, program.contender] = summarise(program_trials[1:])
    return result


def rows(result: RunResult[StartCase], ranks: int) -> list[ReportRow]:
    """Returns the report rows of a run."""
    return [
        ReportRow("start", name, 1 if case.single else ranks, summary, case.facts)
        for (case, name), summary in result.summaries.items()
    ]


def sections(measured: Sequence[ReportRow]) -> list[tuple[str, list[ReportRow]]]:
    """Returns the rows of each case, under its name."""
    found: dict[str, list[ReportRow]] = {}
    for row in measured:
        label = f"{row.facts['case']}, {row.ranks} process{'es' if row.ranks > 1 else ''}"
        found.setdefault(label, []).append(row)
    return list(found.items())


def table(title: str, measured: Sequence[tuple[str, Sequence[ReportRow]]]) -> Table:
    """Returns the table of the ``sections``."""
    return compare(title, measured, notes=("÷: the contender's time divided by choros'; above 1, choros takes less.",))
