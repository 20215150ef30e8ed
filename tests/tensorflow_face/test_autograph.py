"""AutoGraph has nothing to report of choros; the cases are in ``autograph_cases.py``."""

from harness import Job, check_case, on

MODULE = "tensorflow_face.autograph_cases"


@on(Job(2, "tensorflow", name="autograph"), cases=MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
