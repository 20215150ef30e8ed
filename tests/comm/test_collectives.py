"""The cases of collectives, of their matching and of mismatches, on every engine."""

import pytest

from comm.engines import ONE_RANK, SEVERAL_RANKS, OneRank, Threads, check
from harness import Job, case_names

COLLECTIVES = "comm.collective_cases"
MATCHING = "comm.matching_cases"
MISMATCHES = "comm.mismatch_cases"


@pytest.mark.parametrize("job", ONE_RANK + SEVERAL_RANKS, ids=str)
@pytest.mark.parametrize("case", case_names(COLLECTIVES))
def test_collective(case: str, job: OneRank | Threads | Job) -> None:
    check(COLLECTIVES, case, job)


@pytest.mark.parametrize("job", SEVERAL_RANKS, ids=str)
@pytest.mark.parametrize("case", case_names(MISMATCHES))
def test_mismatch(case: str, job: Threads | Job) -> None:
    check(MISMATCHES, case, job)


@pytest.mark.parametrize("job", SEVERAL_RANKS, ids=str)
@pytest.mark.parametrize("case", case_names(MATCHING))
def test_matching(case: str, job: Threads | Job) -> None:
    check(MATCHING, case, job)
