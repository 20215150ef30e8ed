"""Optimizers of which each rank has a slice of the state, on two and three ranks; see ``sharded_cases.py``."""

import pytest

from harness import Job, case_names, check_case, on

MODULE = "torch_face.sharded_cases"


@on(Job(2, "torch"), Job(3, "torch"))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_sharded(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
