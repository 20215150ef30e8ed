"""The TensorFlow API on two ranks, its loops also on three; the cases are in ``…_cases.py``."""

import pytest

from harness import Job, case_names, check_case, on

API, TAPE = "tensorflow_face.api_cases", "tensorflow_face.tape_cases"
ON_THREE = (
    "case_even_batches",
    "case_uneven_batches_of_known_sizes",
    "case_uneven_batches_whose_losses_are_summed",
)


@on(Job(2, "tensorflow"))
@pytest.mark.parametrize(("module", "case"), [(module, case) for module in (API, TAPE) for case in case_names(module)])
def test_two_ranks(module: str, case: str, job: Job) -> None:
    check_case(module, case, job)


@pytest.mark.program
@on(Job(3, "tensorflow"))
@pytest.mark.parametrize("case", ON_THREE)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(TAPE, case, job)
