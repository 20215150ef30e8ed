"""Losses and metrics on two real ranks of each framework, and on three; the cases are in ``loss_cases.py``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "training.loss_cases"
#: The cases of three ranks, on one framework.
CORE = ("case_sum", "case_masked_sequences", "case_plain_function_and_confusion_matrices", "case_two_optimizers")


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(Job(3, "torch"))
@pytest.mark.parametrize("case", CORE)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
