"""The parts of the coordinator that need no processes; the cases import Keras."""

import pytest

from harness import Job, case_names, check_case, on

MODULE = "distribute.coordinator_cases"


@on(Job(2, "torch"))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
