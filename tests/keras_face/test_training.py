"""The Keras face on each framework, on 2 and 3 real ranks; the cases are in ``training_cases.py``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "keras_face.training_cases"
#: What three ranks are asked on each framework; two are asked everything.
CORE = (
    "case_sgd_with_momentum_on_uneven_batches",
    "case_adam_with_global_clipnorm_on_uneven_batches",
    "case_last_batch_smaller_than_the_number_of_ranks",
    "case_ranks_with_other_numbers_of_batches",
    "case_process_set_trains_its_members_only",
)


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(*(Job(3, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", CORE)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
