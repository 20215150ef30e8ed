"""Cases that every engine must pass: functions of a communicator, run on ranks of each kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from choros.comm import Communicator
from choros.comm.engines.local import LocalCommunicator
from choros.comm.engines.threads import run_threads
from harness import Job, check_case
from ranks.job import TorchRun


@dataclass(frozen=True)
class OneRank:
    """The engine of one rank, in this process."""

    def check(self, case: Callable[[Communicator], None]) -> None:
        case(LocalCommunicator())

    def __str__(self) -> str:
        return "local-1"


@dataclass(frozen=True)
class Threads:
    """The threads engine, which is for tests, in this process."""

    ranks: int

    def check(self, case: Callable[[Communicator], None]) -> None:
        run_threads(case, self.ranks)

    def __str__(self) -> str:
        return f"threads-{self.ranks}"


ON_TORCH = Job(3, "torch", launcher=TorchRun())
ONE_RANK = [OneRank(), Threads(1)]
SEVERAL_RANKS = [Threads(2), Threads(3), Job(2), Job(3), ON_TORCH]


def check(module: str, case: str, job: OneRank | Threads | Job) -> None:
    """Runs ``case`` of ``module`` on ``job``; fails if it fails on any rank."""
    if isinstance(job, Job):
        check_case(module, case, job)
    else:
        job.check(getattr(importlib.import_module(module), case))
