import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

OPS = "parallel.ops_cases"


@on(Job(2), *(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(OPS))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(OPS, case, job)
