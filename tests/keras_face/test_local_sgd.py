"""Local SGD and DiLoCo on two real ranks; the cases are in ``local_sgd_cases.py``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "keras_face.local_sgd_cases"
#: What differs between frameworks: where weights are during an epoch, and how steps are run.
CORE = (
    "case_averaging_at_every_step_equals_training_on_whole_batches",
    "case_ranks_with_other_numbers_of_batches",
    "case_steps_that_keras_runs_together_count_each",
)


@on(Job(2, FRAMEWORKS[-1]))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_one_framework(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(*(Job(2, framework) for framework in FRAMEWORKS[:-1]))
@pytest.mark.parametrize("case", CORE)
def test_other_frameworks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
