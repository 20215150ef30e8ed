"""Optimizer states in slices on two ranks and on three; the cases are in ``sharded_cases.py``."""

import pytest

from harness import Job, case_names, check_case, needs, on

CASES = "jax_face.sharded_cases"


@needs("optax")
@on(Job(2, "jax"), Job(3, "jax"))
@pytest.mark.parametrize("case", case_names(CASES))
def test_sharded(case: str, job: Job) -> None:
    check_case(CASES, case, job)
