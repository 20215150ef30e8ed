"""Every collective, called in a ``tf.function`` that AutoGraph converts: TensorFlow has nothing to report.

Run by ``test_autograph.py``, in a job of its own: AutoGraph reports a function only once in a process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

import choros.keras as hvd_keras
import choros.tensorflow as hvd
from choros import distribute


@contextmanager
def nothing_reported() -> Iterator[None]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = tf.get_logger()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [message for message in messages if "AutoGraph" in message] == []


def run_all(calls: dict[str, Callable[[], object]]) -> None:
    with nothing_reported():
        for call in calls.values():
            tf.function(call)()


def rows() -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))


def case_strategies():
    strategy = distribute.MirroredStrategy()
    x = tf.ones((4, 2))

    def in_replica(function):
        def of_context():
            return function(distribute.get_replica_context())

        return lambda: strategy.run(of_context)

    run_all(
        {
            "reduce": lambda: strategy.reduce("SUM", x, axis=None),
            "mean": lambda: strategy.reduce("MEAN", {"a": x, "b": [x]}, axis=None),
            "reduce rows": lambda: strategy.reduce("MEAN", x, axis=0),
            "reduce slices": lambda: strategy.reduce("SUM", rows(), axis=None),
            "gather": lambda: strategy.gather(x, axis=0),
            "local results": lambda: strategy.experimental_local_results(x),
            "all_reduce": in_replica(lambda context: context.all_reduce("SUM", [x, x])),
            "all_reduce slices": in_replica(lambda context: context.all_reduce("SUM", rows())),
            "all_gather": in_replica(lambda context: context.all_gather(x, 0)),
            "merge_call": in_replica(
                lambda context: context.merge_call(lambda strategy, value: strategy.reduce("SUM", value, None), (x,))
            ),
            "reduce_to": lambda: strategy.extended.reduce_to("SUM", x, destinations=None),
            "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("SUM", [(x, None)]),
        }
    )


def case_horovod():
    x, splits = tf.ones((4, 2)), tf.constant([2, 2])
    run_all(
        {
            f"{face.__name__} {name}": call
            for face in (hvd, hvd_keras)
            for name, call in {
                "allreduce": lambda face=face: face.allreduce(x),
                "allgather": lambda face=face: face.allgather(x),
                "broadcast": lambda face=face: face.broadcast(x, 0),
                "reducescatter": lambda face=face: face.reducescatter(x),
                "alltoall": lambda face=face: face.alltoall(x, splits),
            }.items()
        }
        | {
            "allreduce slices": lambda: hvd.allreduce(rows()),
            "grouped_allreduce": lambda: hvd.grouped_allreduce([x, x]),
            "grouped_allgather": lambda: hvd.grouped_allgather([x, x]),
            "grouped_reducescatter": lambda: hvd.grouped_reducescatter([x, x]),
            "keras slices": lambda: hvd_keras.allreduce(rows()),
            "sizes": lambda: (hvd.size_op(), hvd.rank_op(), hvd.local_rank_op(), hvd.local_size_op()),
            "broadcast_variables": lambda: hvd.broadcast_variables([VARIABLE], 0),
            "keras broadcast_variables": lambda: hvd_keras.broadcast_variables([VARIABLE], 0),
        }
    )


VARIABLE = tf.Variable(tf.ones(3))


def case_a_custom_loop():
    """As in the issue: ``strategy.reduce`` of a step's losses, in a function of TensorFlow."""
    import keras

    strategy = distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(tf.ones((8, 2))).batch(4))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2) / 4
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    @tf.function
    def distributed(x):
        return strategy.reduce(distribute.ReduceOp.SUM, strategy.run(step, args=(x,)), axis=None)

    with nothing_reported():
        for batch in batches:
            distributed(batch)
