"""The script of a job that resumes from what parameter_server_script.py saved; every process runs it.

It begins with one worker; a second one joins later.
"""

from __future__ import annotations

import time
import warnings
from itertools import groupby
from pathlib import Path

import keras
import pytest

from choros.distribute.coordinator import ClusterCoordinator
from choros.distribute.partitioners import MinSizePartitioner
from choros.errors import StrategyError
from choros.parameter_server import ParameterServerStrategy
from distribute import parameter_server_common as common
from distribute.parameter_server_common import FRAMEWORK, SHARD, TASK, X, Y, assert_close, network, train
from distribute.slot_checks import check_all

BOUND = 0


def load(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return keras.models.load_model(name, custom_objects={"Watched": keras.Sequential})


strategy = ParameterServerStrategy(variable_partitioner=MinSizePartitioner(SHARD, max_shards=3), max_staleness=BOUND)
with strategy.scope():
    MODELS = {"model": load("adam.keras")}
    if FRAMEWORK != "jax":
        built = network(40, keras.optimizers.Adam(0.01))
        built.optimizer.build(built.trainable_variables)
    if FRAMEWORK == "torch":
        MODELS["weights"] = built
        built.load_weights("adam.weights.h5")
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        MODELS["checkpoint"] = built
        tf.train.Checkpoint(model=built, optimizer=built.optimizer).read("adam.checkpoint")


def case_a_loaded_model_continues_training():
    expected = load("adam.expected.keras")
    for model in MODELS.values():
        train(model)
        assert_close(model.get_weights(), expected.get_weights())
        assert_close(*([v.numpy() for v in each.optimizer.variables] for each in (model, expected)))


def case_with_two_no_worker_exceeds_max_staleness():
    coordinator = ClusterCoordinator(strategy)
    common.admit_worker("parameter_server_resumed", coordinator, "1.1")

    def step():
        with Path("order").open("a") as file:
            file.write(common.WORKER[0])
        time.sleep(0.05 if common.WORKER == "1.1" else 0)

    for _ in range(40):
        coordinator.schedule(step)
    coordinator.join()
    order = Path("order").read_text()
    assert len(order) == 40
    # A worker writes some time after its step has begun, so each run may have the length of two.
    runs = [len(list(run)) for _, run in groupby(order[order.index("1") :])]
    assert max(runs) <= 2 * (2 * BOUND + 2), order


def case_with_two_every_optimizer_resumes_from_the_servers_slots():
    check_all()


def evaluate():
    """The evaluator trains and evaluates on its own, as a single device."""
    expected = load("adam.keras")
    assert MODELS["model"].evaluate(X, Y, verbose=0) == expected.evaluate(X, Y, verbose=0)
    for model in (MODELS["model"], expected):
        train(model, epochs=1)
    assert_close(MODELS["model"].get_weights(), expected.get_weights())
    with pytest.raises(StrategyError, match="evaluator"):
        ClusterCoordinator(strategy)


if __name__ == "__main__":
    if TASK["type"] == "evaluator":
        evaluate()
    else:
        common.run_cases(dict(globals()))
