"""One body a behaviour, on every engine."""

import pytest

from comm.engines import ALONE, TOGETHER, Alone, Threads, check
from harness import Job, case_names

COLLECTIVES = "comm.collective_cases"
MISMATCHES = "comm.mismatch_cases"


@pytest.mark.parametrize("job", ALONE + TOGETHER, ids=str)
@pytest.mark.parametrize("case", case_names(COLLECTIVES))
def test_collective(case: str, job: Alone | Threads | Job) -> None:
    check(COLLECTIVES, case, job)


@pytest.mark.parametrize("job", TOGETHER, ids=str)
@pytest.mark.parametrize("case", case_names(MISMATCHES))
def test_mismatch(case: str, job: Threads | Job) -> None:
    check(MISMATCHES, case, job)
