from __future__ import annotations

import sys

import pytest

from distribute.parameter_server_jobs import Job, Outcome, run_jobs
from harness import FRAMEWORKS, case_names
from launch.launched import run
from ranks import pool

pytestmark = pytest.mark.slow
pool.FORGET.append(run_jobs.cache_clear)

FIRST, RESUMED, SERVED = "parameter_server_script", "parameter_server_resumed", "parameter_server_served"
#: Several workers are tested with one framework, as their coordination is independent of it. A single one is tested
#: with TensorFlow as well, whose checkpoints it resumes from; on JAX, servers are in its process (test_in_process.py).
WITH_TWO_WORKERS = "torch" if "torch" in FRAMEWORKS else FRAMEWORKS[0]
#: What a job resumes from is Keras' file, or on TensorFlow also its checkpoint.
RESUMES = {"torch", "tensorflow", WITH_TWO_WORKERS}
CASES = [
    (framework, case)
    for framework in FRAMEWORKS
    if framework in RESUMES
    for script in (FIRST, RESUMED)
    for case in case_names(f"distribute.{script}")
    if framework == WITH_TWO_WORKERS or not case.startswith("case_with_two_")
]
CASES += [(WITH_TWO_WORKERS, case) for case in case_names(f"distribute.{SERVED}")]


def jobs(framework: str) -> Outcome:
    if framework == WITH_TWO_WORKERS:
        return run_jobs(
            framework,
            Job(FIRST, workers=2, servers=2, lives=2),
            Job(RESUMED, workers=2, servers=2, evaluator=True),
            Job(SERVED, workers=2, servers=2),
        )
    return run_jobs(framework, Job(FIRST), Job(RESUMED, servers=2))


@pytest.mark.parametrize(("framework", "case"), CASES)
def test_case(framework: str, case: str) -> None:
    outcome = jobs(framework)
    assert case in outcome.errors, outcome
    assert not outcome.errors[case], f"\n{outcome.errors[case]}"


@pytest.mark.parametrize("framework", [framework for framework in FRAMEWORKS if framework in RESUMES])
def test_all_processes_end_with_the_chief(framework: str) -> None:
    outcome = jobs(framework)
    first = resumed = {"ps 0": 0, "worker 0": 0, "chief 0": 0}
    resumed = {**resumed, "ps 1": 0}
    if framework == WITH_TWO_WORKERS:
        first = {**first, "ps 1": -9, "worker 1": -9, "worker 1 again": 0, "chief 0": 69}
        resumed = {**resumed, "worker 1": 0, "evaluator 0": 0}
    expected = {FIRST: first, RESUMED: resumed}
    if framework == WITH_TWO_WORKERS:
        expected[SERVED] = dict.fromkeys(("ps 0", "ps 1", "worker 0", "worker 1", "chief 0"), 0)
    assert outcome.codes == expected, outcome


def test_a_lost_server_is_an_error_on_the_chief() -> None:
    stderr = jobs(WITH_TWO_WORKERS).stderr[FIRST]["chief 0"]
    assert "ParameterServerLost: parameter server 1 is lost" in stderr
    assert "from the last checkpoint" in stderr


AFTER_A_FAILURE = """
import keras
import numpy as np
from choros.distribute import ParameterServerStrategy

class Failing(keras.optimizers.SGD):
    @classmethod
    def from_config(cls, config):
        raise ArithmeticError("on a worker")

strategy = ParameterServerStrategy()
for optimizer in (keras.optimizers.SGD, Failing, keras.optimizers.SGD):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse")
    try:
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
        print("trained", flush=True)
    except ArithmeticError as error:
        print(error, flush=True)
"""


def test_a_model_is_trained_after_another_has_failed() -> None:
    command = (sys.executable, "-c", AFTER_A_FAILURE)
    env = {"KERAS_BACKEND": WITH_TWO_WORKERS}
    ended = run("-np", 1, "--ps", 1, "--no-prefix-output", *command, env=env, warm=True)
    assert (ended.code, ended.out.splitlines()) == (0, ["trained", "on a worker", "trained"]), ended.err
