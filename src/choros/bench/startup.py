"""``choros bench start``: the time from a command to its end, for programs that do next to nothing, anew each trial."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from choros import durations
from choros.bench.contender import CHOROS, SAFE, Contender, LaunchCommand, chorosrun, mpirun, plain, torchrun
from choros.bench.figures import Trial
from choros.bench.process_group import run_to_end
from choros.bench.report import Row, grouped
from choros.bench.run import RunResult

_NOTHING = ("-c", "pass")
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
    return plain(argv, {})


#: Of each case, programs, choros' first, that do the same work.
Cases = Mapping[str, Sequence[Contender]]
CASES: Cases = {
    "python -c pass": [
        Contender(CHOROS, chorosrun, _NOTHING),
        Contender("mpirun", mpirun, _NOTHING),
        Contender("torchrun", _torchrun, _NOTHING, ["torch"]),
    ],
    "a first allreduce of 3 numbers": [
        Contender(CHOROS, chorosrun, ["-c", _CHOROS]),
        Contender("mpi4py", mpirun, ["-c", _MPI4PY], ["mpi4py"]),
        Contender("torch Gloo", _torchrun, ["-c", _TORCH], ["torch"]),
    ],
    "import": [
        Contender(CHOROS, _python, ["-c", "import choros"], single=True),
        Contender("choros, a first use", _python, ["-c", "import choros; choros.init"], single=True),
        Contender("numpy", _python, ["-c", "import numpy"], single=True),
    ],
}

NOTES = ("÷: the contender's time divided by choros'; above 1, choros takes less.",)


def measure(command: LaunchCommand) -> Trial:
    """Runs ``command``, which must succeed; returns wall time, and CPU time of all its processes waited for."""
    began, before = time.perf_counter(), _cpu_seconds()
    run_to_end(replace(command, environ={**SAFE, **command.environ}), durations.BENCH_STARTUP)
    return Trial(time.perf_counter() - began, _cpu_seconds() - before)


def _cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def run_starts(
    cases: Cases, names: Sequence[str], ranks: int, rounds: int, show_progress: Callable[[str], None]
) -> RunResult[str]:
    """Measures all cases, the programs of each in interleaved rounds; the first round is not counted."""
    result: RunResult[str] = RunResult(rounds, show_progress)

    def trial(program: Contender, _number: int) -> Trial:
        (command,) = program.start(ranks, program.argv)
        return measure(command)

    for case, programs in cases.items():
        since = f", {case}"
        wanted = [each for each in programs if each.name in names]
        left = [each for each in wanted if result.attempt(each.name, since, each.check_installed)]
        result.interleave(case, since, rounds, {program.name: partial(trial, program) for program in left})
    return result


def row(ranks: int, case: str, name: str, summary: Row) -> Row:
    """Returns the row of a program."""
    single = any(each.single for each in CASES.get(case, ()) if each.name == name)
    return {"bench": "start", "peer": name, "ranks": 1 if single else ranks, **summary, "case": case}


def sections(measured: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Returns the rows of each case, under its name."""
    return grouped(measured, lambda row: f"{row['case']}, {row['ranks']} process{'es' if row['ranks'] > 1 else ''}")
