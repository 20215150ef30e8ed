"""The gradient noise scale where users see it; its numbers: ``tests/parallel/test_noise.py``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

FIT, LOOP = "training.noise_cases", "torch_face.noise_cases"


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(FIT))
def test_fit(case: str, job: Job) -> None:
    check_case(FIT, case, job)


@on(Job(3, "torch"))
def test_fit_on_three_ranks(job: Job) -> None:
    check_case(FIT, "case_a_strategy", job)


@on(Job(2, "torch"))
@pytest.mark.parametrize("case", case_names(LOOP))
def test_a_loop(case: str, job: Job) -> None:
    check_case(LOOP, case, job)
