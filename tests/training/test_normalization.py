"""Synchronised batch normalisation on two real ranks of each framework, and on three."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "training.normalization_cases"
#: The cases of three ranks, on one framework.
CORE = ("case_fit", "case_masked_sequences_and_renormalization", "case_custom_loop", "case_horovods_face")


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@on(Job(3, "torch"))
@pytest.mark.parametrize("case", CORE)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
