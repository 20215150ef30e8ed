from __future__ import annotations

import pytest

from harness import FRAMEWORKS, Job, case_names, check_case, on

JOBS = [Job(1, framework, hidden=() if framework == "tensorflow" else ("tensorflow",)) for framework in FRAMEWORKS]
OF_TENSORFLOW = [
    "case_a_servers_compiled_update_takes_any_number_of_rows",
    "case_workers_trace_functions_that_the_chief_has_not",
    "case_the_tutorial_of_tensorflow",
    "case_layers_compute_of_large_statistics_what_the_chief_has_computed",  # Normalization needs it
    "case_a_models_own_step_is_traced_on_the_chief_for_its_first_batch_only",
]
#: JAX has no variables.
OF_VARIABLES = "case_variables_that_functions_capture_must_not_change"
CASES = [case for case in case_names("distribute.in_process_cases") if case not in OF_TENSORFLOW]


@on(*JOBS)
@pytest.mark.parametrize("case", CASES)
def test_in_process(case: str, job: Job) -> None:
    check_case("distribute.in_process_cases", case, job)


@on(Job(1, "tensorflow"))
@pytest.mark.parametrize("case", OF_TENSORFLOW)
def test_tensorflow(case: str, job: Job) -> None:
    check_case("distribute.in_process_cases", case, job)


@on(*JOBS)
@pytest.mark.parametrize("case", [case for case in case_names("distribute.assigned_cases") if case != OF_VARIABLES])
def test_assigned(case: str, job: Job) -> None:
    check_case("distribute.assigned_cases", case, job)


@on(*[job for job in JOBS if job.framework != "jax"])
def test_captured_variables(job: Job) -> None:
    check_case("distribute.assigned_cases", OF_VARIABLES, job)


@on(*JOBS, cases="distribute.recipe_cases")
def test_recipes(case: str, job: Job) -> None:
    check_case("distribute.recipe_cases", case, job)
