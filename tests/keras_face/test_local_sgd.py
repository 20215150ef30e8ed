"""Local SGD and DiLoCo on two real ranks; the cases are in ``local_sgd_cases.py``."""

import pytest

from harness import FRAMEWORKS, case_names, check_case

MODULE = "keras_face.local_sgd_cases"
ALL = tuple(case_names(MODULE))
#: What differs between frameworks: where weights are during an epoch, and how steps are run.
CORE = (
    "case_averaging_at_every_step_equals_training_on_whole_batches",
    "case_ranks_with_other_numbers_of_batches",
    "case_steps_that_keras_runs_together_count_each",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ALL)
def test_one_framework(case: str) -> None:
    check_case(MODULE, 2, case, FRAMEWORKS[-1], ALL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", FRAMEWORKS[:-1])
@pytest.mark.parametrize("case", CORE)
def test_other_frameworks(case: str, framework: str) -> None:
    check_case(MODULE, 2, case, framework, CORE)
