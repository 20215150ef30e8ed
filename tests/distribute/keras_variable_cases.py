"""Keras variables with ``aggregation`` and ``synchronization`` under a strategy, on two ranks of each framework."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import keras
import numpy as np
import pytest

import choros
from choros import distribute
from choros.errors import ConfigError
from choros.parallel.objects import allgather_object, broadcast_object

BACKEND = keras.backend.backend()
JIT = False if BACKEND == "tensorflow" else "auto"


@functools.cache
def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


def number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def nothing(_: Any) -> None:
    """Ends a step that returns no tensor."""


def run(step: Any, *, compiled: bool = False) -> Any:
    if not compiled:
        return strategy().run(step)
    import tensorflow as tf

    return tf.function(lambda: strategy().run(step))()


class Keeper(keras.layers.Layer):
    """Has a weight that is assigned in its call."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.total = keras.Variable(0.0, trainable=False, name="total", **how)

    def call(self, x):
        self.total.assign_add(keras.ops.sum(x))
        return x


def case_assignments_in_a_loop():
    """Of the values 1 and 2, as ``tf.distribute`` aggregates them; ``none``: each replica keeps its own."""
    rank = choros.rank()
    expected = {"none": 1.0 + rank, "sum": 3.0, "mean": 1.5, "only_first_replica": 1.0}
    for aggregation, total in expected.items():
        with strategy().scope():
            layer = keras.layers.Layer()
            of_layer = layer.add_weight((), "zeros", trainable=False, aggregation=aggregation)
            variables = [keras.Variable(0.0, aggregation=aggregation, synchronization="on_write"), of_layer]
        for variable in variables:
            for compiled in (False, True) if BACKEND == "tensorflow" else (False,):
                variable.assign(5.0)
                run(lambda variable=variable: nothing(variable.assign(1.0 + rank)), compiled=compiled)
                own = strategy().run(lambda variable=variable: variable + 0.0)
                assert number(own) == total, aggregation
                for method, sign in (("assign_add", 1), ("assign_sub", -1)):
                    variable.assign(5.0)
                    run(lambda method=method, variable=variable: nothing(getattr(variable, method)(1.0 + rank)))
                    own = strategy().run(lambda variable=variable: variable + 0.0)
                    assert number(own) == 5.0 + sign * total, (aggregation, method)
        variables[0].assign(7.0)  # outside of replicas
        assert number(variables[0]) == 7.0


def case_copies_that_are_aggregated_when_they_are_read():
    rank = choros.rank()
    for aggregation, total in {"sum": 3.0, "mean": 1.5, "only_first_replica": 1.0}.items():
        with strategy().scope():
            variable = keras.Variable(4.0, aggregation=aggregation, synchronization="on_read")
        assert number(variable) == 4.0
        variable.assign(0.0)
        before = choros.global_process_set.communicator.collectives
        own = strategy().run(lambda variable=variable: variable.assign_add(1.0 + rank) + 0.0)
        assert choros.global_process_set.communicator.collectives == before
        assert number(own) == 1.0 + rank
        assert number(variable) == total
        assert "value" not in repr(variable)
        variable.assign(8.0)
        assert number(variable) == 8.0
    with strategy().scope():
        variable = keras.Variable(0.0, aggregation="sum", synchronization="on_read")
    with pytest.raises(ConfigError, match="sum of the replicas"):
        variable.assign_add(1.0)
    with strategy().scope():
        counter = keras.Variable(5, dtype="int32", trainable=False, aggregation="sum", synchronization="on_read")
    assert number(counter) == 5  # though no replica has a half
    for value in (7, -3):
        counter.assign(value)
        assert number(counter) == value


def case_collectives_of_variables():
    """Their results are tensors of the framework; a copy that is not read is this replica's."""
    here, context = strategy(), distribute.get_replica_context
    with here.scope():
        variable = keras.Variable([1.0, 2.0])
        copies = keras.Variable(0.0, synchronization="on_read", aggregation="sum")
    here.run(lambda: nothing(copies.assign(1.0 + choros.rank())))
    sums = [
        here.reduce("SUM", {"a": variable}, axis=None)["a"],
        here.extended.reduce_to("SUM", variable, variable),
        here.run(lambda: context().all_reduce("SUM", variable)),
    ]
    numbers = [here.reduce("SUM", variable, axis=0), here.reduce("SUM", copies, axis=None) * 2]
    rows = [here.gather(variable, axis=0), here.run(lambda: context().all_gather(variable, axis=0))]
    for result, expected in [(sums, [2.0, 4.0]), (numbers, 6.0), (rows, [1.0, 2.0, 1.0, 2.0])]:
        assert all(map(keras.ops.is_tensor, result))
        for each in result:
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(each), expected)


def case_saved_copies():
    with strategy().scope():
        model = keras.Sequential([keras.Input((2,)), Keeper(aggregation="sum", synchronization="on_read")])
    rows = keras.ops.ones((1 + choros.rank(), 2))
    strategy().run(lambda: nothing(model(rows)))
    path = broadcast_object(tempfile.mkdtemp()) + "/model.weights.h5"
    model.save_weights(path)
    with strategy().scope():
        again = keras.Sequential([keras.Input((2,)), Keeper()])
    again.load_weights(path)
    assert number(again.layers[0].total) == number(model.layers[0].total) == 6.0


def case_checkpoints_of_tensorflow_have_and_give_back_sums():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    own = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with strategy().scope():
        one, other = tf.Variable(0.0, **own), keras.Variable(0.0, synchronization="on_read", aggregation="sum")
        checkpoint = tf.train.Checkpoint(one=one, other=other)
    strategy().run(lambda: (one.assign_add(1.0 + choros.rank()), other.assign_add(1.0 + choros.rank())))
    path = checkpoint.save(broadcast_object(tempfile.mkdtemp()) + "/sums")
    for _ in range(2):
        assert (float(one.read_value()), number(other)) == (3.0, 3.0)
        checkpoint.restore(path).assert_consumed()


def case_fit_counts_the_rows_of_all_replicas():
    """A layer's sum is that of one process; every third batch of a stream has one row."""

    def model_of(**how):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), Keeper(**how), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=JIT)
        return model

    x, y = np.random.default_rng(0).normal(size=(17, 2)).astype("float32"), np.zeros((17, 1), "float32")
    batches = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)] * 2
    plain = model_of()
    for _ in range(2):
        plain.fit((each for each in batches), shuffle=False, verbose=0)
    for synchronization in ("auto", "on_read"):
        with strategy().scope():
            ours = model_of(aggregation="sum", synchronization=synchronization)
        for _ in range(2):
            ours.fit((each for each in batches), shuffle=False, verbose=0)
        totals = allgather_object(number(ours.layers[0].total))
        np.testing.assert_allclose(totals, number(plain.layers[0].total), rtol=1e-5)


def case_optimizers_and_metrics_are_as_before():
    """Optimizers have identical counts on all replicas, and identical updates of variables that are to be summed."""
    with strategy().scope():
        variable = keras.Variable(1.0, aggregation="sum")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
        metric = keras.metrics.Mean()

    def step():
        optimizer.apply([keras.ops.convert_to_tensor(0.25)], [variable])
        metric.update_state(1.0 + choros.rank())

    strategy().run(step)
    assert number(optimizer.iterations) == 1
    assert number(variable) == 0.5
    assert number(metric.result()) == 1.5


def case_values_of_different_sizes_are_an_error():
    shape = (1 + choros.rank(),)
    with strategy().scope():
        variable = keras.Variable(0.0, aggregation="sum")
    with pytest.raises(choros.errors.MismatchError, match="different sizes"):
        strategy().run(lambda: variable.assign_add(keras.ops.ones(shape)))
