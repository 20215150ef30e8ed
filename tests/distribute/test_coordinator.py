"""The parts of the coordinator that need no processes; the cases import Keras."""

from harness import Job, check_case, on

MODULE = "distribute.coordinator_cases"


@on(Job(2, "torch"), cases=MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
