"""TensorFlow's own names in a strategy; the cases are in ``tf_names_cases.py``."""

from harness import Job, check_case, on

MODULE = "distribute.tf_names_cases"


@on(Job(2, "tensorflow"), cases=MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
