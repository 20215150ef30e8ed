"""How far ``fit`` is, as rank 0 reports it, on each framework."""

from harness import Job, check_case, on_frameworks

CASES = "training.metric_report_cases"


@on_frameworks(CASES)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)
