"""Each face's collectives on 2, 3 and 4 ranks; on four, and on three of TensorFlow and JAX, in ``make test-all``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case

CASES = "parallel.conformance_cases"
#: What frameworks do not have.
ABSENT = {
    "": ("case_values_of_each_dtype_in_a_compiled_function", "case_gradients_of_each_dtype"),
    "torch": ("case_values_of_each_dtype_in_a_compiled_function",),
}


def cases_of(*jobs: Job) -> pytest.MarkDecorator:
    pairs = [(case, job) for job in jobs for case in case_names(CASES) if case not in ABSENT.get(job.framework, ())]
    return pytest.mark.parametrize(("case", "job"), pairs, ids=str)


@pytest.mark.each_framework
@cases_of(Job(2), *(Job(2, framework) for framework in FRAMEWORKS))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)


@pytest.mark.program
@cases_of(*(Job(3, framework) for framework in FRAMEWORKS))
def test_three_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)


@pytest.mark.nightly
@cases_of(*(Job(4, framework) for framework in FRAMEWORKS))
def test_four_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)
