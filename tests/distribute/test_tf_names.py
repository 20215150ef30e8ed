"""TensorFlow's own names in a strategy; the cases are in ``tf_names_cases.py``."""

import pytest

from harness import Job, case_names, check_case, on

MODULE = "distribute.tf_names_cases"


@on(Job(2, "tensorflow"))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
