"""The callback ``TensorBoard``; the cases are in ``tensorboard_cases.py``. With several ranks: ``tests/examples``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "keras_face.tensorboard_cases"


#: Those that do without TensorFlow.
JOBS = [Job(1, framework, hidden=("tensorflow",)) for framework in FRAMEWORKS if framework != "tensorflow"]


@on(*JOBS)
@pytest.mark.parametrize("case", case_names(MODULE))
def test_one_rank(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
