"""Ranks compare what they train every few steps."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

FIT = "training.divergence_cases"
LOOPS = {"torch": "torch_face.divergence_cases", "tensorflow": "tensorflow_face.divergence_cases"}


@on(*(Job(2, framework) for framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(FIT))
def test_fit(case: str, job: Job) -> None:
    check_case(FIT, case, job)


@on(Job(3, "torch"))
def test_the_rank_is_named(job: Job) -> None:
    check_case(FIT, "case_a_flipped_bit_is_found_in_fit", job)


@pytest.mark.parametrize(
    ("job", "case"),
    [
        (Job(2, framework), case)
        for framework in FRAMEWORKS
        if framework in LOOPS
        for case in case_names(LOOPS[framework])
    ],
    ids=str,
)
def test_loops(job: Job, case: str) -> None:
    check_case(LOOPS[job.framework], case, job)
