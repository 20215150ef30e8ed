from __future__ import annotations

import pytest

from distribute.parameter_server_jobs import Outcome, run_job
from harness import FRAMEWORKS, case_names

SCRIPT = "parameter_server_script"
CASES = case_names(f"distribute.{SCRIPT}")
#: What one worker does differs between frameworks; what several do with each other does not.
WITH_TWO_WORKERS = "jax" if "jax" in FRAMEWORKS else FRAMEWORKS[0]


def job(framework: str) -> Outcome:
    two = framework == WITH_TWO_WORKERS
    return run_job(f"{SCRIPT}.py", framework, workers=1 + two, servers=1 + two, late=two)


@pytest.mark.parametrize(
    ("framework", "case"),
    [
        (framework, case)
        for framework in FRAMEWORKS
        for case in CASES
        if framework == WITH_TWO_WORKERS or not case.startswith("case_with_two_")
    ],
)
def test_case(framework: str, case: str) -> None:
    outcome = job(framework)
    assert case in outcome.errors, outcome
    assert not outcome.errors[case], f"\n{outcome.errors[case]}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_processes_end_with_the_chief(framework: str) -> None:
    outcome = job(framework)
    if framework == WITH_TWO_WORKERS:
        expected = {"ps 1": -9, "worker 1": -9, "worker 1 again": 0, "chief 0": 1}
    else:
        expected = {"chief 0": 0}
    assert outcome.codes == {"ps 0": 0, "worker 0": 0, **expected}, outcome


def test_a_lost_server_is_an_error_on_the_chief() -> None:
    said = job(WITH_TWO_WORKERS).said["chief 0"]
    assert "ParameterServerLost: parameter server 1 is gone" in said
    assert "from the last checkpoint" in said
