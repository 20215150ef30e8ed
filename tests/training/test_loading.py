"""How long steps wait for their data, on each framework."""

from harness import Job, check_case, on_frameworks

CASES = "training.loading_cases"


@on_frameworks(CASES)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)
