"""Sparse gradients on two and three ranks of TensorFlow; the cases are in ``sparse_cases.py``."""

from harness import Job, check_case, on

MODULE = "keras_face.sparse_cases"


@on(Job(2, "tensorflow"), cases=MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
