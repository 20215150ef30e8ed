"""The callback ``TensorBoard``; the cases are in ``tensorboard_cases.py``. With several ranks: ``tests/examples``."""

from harness import Job, check_case, on

MODULE = "keras_face.tensorboard_cases"


@on(Job(1, "torch", hidden=("tensorflow",)), cases=MODULE)
def test_one_rank(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
