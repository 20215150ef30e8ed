import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

GRADIENTS = "parallel.gradient_cases"


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(GRADIENTS))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(GRADIENTS, case, job)
