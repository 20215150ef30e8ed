"""The synchronous strategies on each framework, on two real ranks."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "distribute.strategy_cases"
LOOPS = "distribute.custom_loop_cases"


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(LOOPS))
def test_custom_loops(case: str, job: Job) -> None:
    check_case(LOOPS, case, job)
