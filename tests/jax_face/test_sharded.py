"""Optimizer states in slices on two ranks and on three; the cases are in ``sharded_cases.py``."""

from harness import Job, check_case, needs, on

CASES = "jax_face.sharded_cases"


@needs("optax")
@on(Job(2, "jax"), Job(3, "jax"), cases=CASES)
def test_sharded(case: str, job: Job) -> None:
    check_case(CASES, case, job)
