"""Sparse gradients on two and three ranks of TensorFlow; the cases are in ``sparse_cases.py``."""

import pytest

from harness import Job, case_names, check_case, on

MODULE = "keras_face.sparse_cases"


@on(Job(2, "tensorflow"))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
