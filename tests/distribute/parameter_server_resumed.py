"""What every process of a job runs that goes on with what parameter_server_script.py has saved.

It begins with one worker; a second one comes later.
"""

from __future__ import annotations

import time
import warnings
from itertools import groupby
from pathlib import Path

import keras
import pytest

from choros.distribute.coordinator import ClusterCoordinator
from choros.distribute.parameter_server import ParameterServerStrategy
from choros.distribute.partitioners import MinSizePartitioner
from choros.errors import StrategyError
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


def case_what_is_loaded_trains_on():
    expected = load("adam.expected.keras")
    for model in MODELS.values():
        train(model)
        assert_close(model.get_weights(), expected.get_weights())
        assert_close(*([v.numpy() for v in each.optimizer.variables] for each in (model, expected)))


def case_with_two_none_is_too_far_ahead():
    coordinator = ClusterCoordinator(strategy)
    common.come("parameter_server_resumed", coordinator, "1.1")

    def step():
        with Path("order").open("a") as file:
            file.write(common.WORKER[0])
        time.sleep(0.05 if common.WORKER == "1.1" else 0)

    for _ in range(40):
        coordinator.schedule(step)
    coordinator.join()
    order = Path("order").read_text()
    assert len(order) == 40
    # What a worker writes may come later than its step has begun, so each run may have the length of two.
    runs = [len(list(run)) for _, run in groupby(order[order.index("1") :])]
    assert max(runs) <= 2 * (2 * BOUND + 2), order


def case_with_two_every_optimizer_goes_on_with_what_servers_kept():
    check_all()


def evaluate():
    """The evaluator is a device of its own."""
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
