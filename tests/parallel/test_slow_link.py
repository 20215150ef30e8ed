"""Training over a link of 100 Mbit/s and 5 ms between two hosts; benchmarks/slow_link measures the time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from harness import ROOT, Job, check_case, on
from ranks.job import Launcher

MODULE = "parallel.slow_link_cases"
LINK = str(ROOT / "benchmarks" / "slow_link" / "link.py")


@final
@dataclass(frozen=True)
class SlowLink(Launcher):
    """A host with one rank at each end."""

    def command(self, ranks: int, program: Sequence[str]) -> tuple[str, ...]:
        assert ranks == 2
        return (sys.executable, LINK, "--", *program)

    def __str__(self) -> str:
        return "slow link"


@on(Job(2, launcher=SlowLink()), cases=MODULE)
def test_two_hosts(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
