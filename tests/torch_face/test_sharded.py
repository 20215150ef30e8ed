"""Optimizers of which each rank has a slice of the state, on two and three ranks; see ``sharded_cases.py``."""

from harness import Job, check_case, on

MODULE = "torch_face.sharded_cases"


@on(Job(2, "torch"), Job(3, "torch"), cases=MODULE)
def test_sharded(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
