"""Replicas that must not drift apart, on two real ranks of each framework; the cases are in ``drift_cases.py``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "distribute.drift_cases"


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
