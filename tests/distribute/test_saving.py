"""Files of a strategy's models; the cases are in ``saving_cases.py``."""

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

MODULE = "distribute.saving_cases"


@on(*(Job(2, framework) for framework in ("tensorflow", "torch") if framework in FRAMEWORKS))
@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)
