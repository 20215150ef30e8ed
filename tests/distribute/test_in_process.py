from __future__ import annotations

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

JOBS = [Job(1, framework, hidden=() if framework == "tensorflow" else ("tensorflow",)) for framework in FRAMEWORKS]
TUTORIAL = "case_the_tutorial_of_tensorflow"
CASES = [case for case in case_names("distribute.in_process_cases") if case != TUTORIAL]


@on(*JOBS)
@pytest.mark.parametrize("case", CASES)
def test_in_process(case: str, job: Job) -> None:
    check_case("distribute.in_process_cases", case, job)


@on(Job(1, "tensorflow"))
def test_tutorial(job: Job) -> None:
    check_case("distribute.in_process_cases", TUTORIAL, job)


@on(*JOBS)
@pytest.mark.parametrize("case", case_names("distribute.recipe_cases"))
def test_recipes(case: str, job: Job) -> None:
    check_case("distribute.recipe_cases", case, job)
