"""Ranks compare what they train every few steps."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on_frameworks

FIT = "training.divergence_cases"
LOOPS = {"torch": "torch_face.divergence_cases", "tensorflow": "tensorflow_face.divergence_cases"}


@on_frameworks(FIT, on_three=["case_a_flipped_bit_is_found_in_fit"])  # there, the rank is named
def test_fit(case: str, job: Job) -> None:
    check_case(FIT, case, job)


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
