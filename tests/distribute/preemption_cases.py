"""A job that is interrupted and started again ends with the weights of an uninterrupted one.

Run by ``test_preemption.py`` on two ranks. Rank 1 receives the signal; the restarted job is a new
model in the same process.
"""

from __future__ import annotations

import functools
import os
import signal

import keras
import numpy as np
import pytest

import choros
from choros.distribute.checkpoints import KerasCheckpoint
from choros.distribute.preemption import PreemptionCheckpointHandler, TerminationConfig
from choros.errors import ConfigError, StrategyError
from distribute.strategy_cases import (
    BACKEND,
    BATCH,
    FEATURES,
    assert_same_weights,
    build,
    data,
    directory,
    fit,
    strategy,
)

STEPS = 6


class Ended(Exception):
    """Ends a job here, instead of ``sys.exit(42)``."""


def end():
    raise Ended


def signal_one_rank():
    if choros.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def handler_of(checkpoint, path) -> PreemptionCheckpointHandler:
    return PreemptionCheckpointHandler(None, checkpoint, path, TerminationConfig(exit_fn=end))


def batch(step):
    x, y = data()
    return x[step * 8 : step * 8 + BATCH], y[step * 8 : step * 8 + BATCH]


def train(model, checkpoint, path, interrupted_after=None):
    handler = handler_of(checkpoint, path)
    with handler.watch_preemption_scope():
        for step in range(handler.total_run_calls, STEPS):
            handler.run(model.train_on_batch, *batch(step))
            if step + 1 == interrupted_after:
                signal_one_rank()
    return handler.total_run_calls


def check_interrupted(create):
    """Interrupts and resumes a job whose model and checkpoint ``create`` returns."""
    before, path = signal.getsignal(signal.SIGTERM), directory()
    with pytest.raises(Ended):
        train(*create(), path, interrupted_after=4)
    model, checkpoint = create()
    assert train(model, checkpoint, path) == STEPS
    assert_same_weights(model, uninterrupted())
    assert signal.getsignal(signal.SIGTERM) is before


@functools.cache
def uninterrupted():
    model = build()
    for step in range(STEPS):
        model.train_on_batch(*batch(step))
    return model


def keras_job(name="mirrored"):
    with strategy(name).scope():
        model = build()
    return model, KerasCheckpoint(model)


def case_an_interrupted_job_resumes():
    check_interrupted(keras_job)


def case_with_the_optimizer_state_on_one_process():
    check_interrupted(lambda: keras_job("central"))


def case_with_checkpoints_of_tensorflow():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    def create():
        with strategy().scope():
            model = build()
            model.optimizer.build(model.trainable_variables)
            return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    check_interrupted(create)


def case_statistics_of_all_replicas_are_saved():
    """A moving average of rows that differ between replicas, in a loop."""
    path = directory()
    with strategy().scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((2,)), layer])
    handler = handler_of(KerasCheckpoint(model), path)
    rows = np.full((4, 2), 4.0 * choros.rank(), "float32")
    with handler.watch_preemption_scope():
        handler.run(strategy().run, lambda: [model(rows, training=True)][:0])
        signal_one_rank()
        with pytest.raises(Ended):
            handler.save_checkpoint_if_preempted()
    with strategy().scope():
        again = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
    handler_of(KerasCheckpoint(again), path)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(again.layers[0].moving_mean), 1.0)


def case_within_fit():
    path = directory()

    def run(interrupted_after=None):
        model, checkpoint = keras_job()
        handler = handler_of(checkpoint, path)

        def at_epoch_end(epoch, logs):
            if epoch + 1 == interrupted_after:
                signal_one_rank()
            handler.save_checkpoint_if_preempted()

        callback = keras.callbacks.LambdaCallback(on_epoch_end=at_epoch_end)
        with handler.watch_preemption_scope():
            fit(model, *data(64), batch_size=BATCH, initial_epoch=handler.total_run_calls, callbacks=[callback])
        return model

    with pytest.raises(Ended):
        run(interrupted_after=2)
    expected = build()
    fit(expected, *data(64), batch_size=BATCH)
    assert_same_weights(run(), expected)


def case_missing_or_mismatched_checkpoints_are_an_error():
    path = directory()
    _, checkpoint = keras_job()
    if choros.rank() == 0:
        (path / "run-7").mkdir()
        checkpoint.save(str(path / "run-7" / "checkpoint"))
    with pytest.raises(StrategyError, match=r"different checkpoints: run-7, None\. .* that all hosts share"):
        PreemptionCheckpointHandler(None, checkpoint, path if choros.rank() == 0 else path / "elsewhere")
    with strategy().scope():
        other = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(5)])
    choros.global_process_set.communicator.barrier()
    with pytest.raises(ConfigError, match=r"shape of optimizer 0 is \(\) in the file, and missing here"):
        PreemptionCheckpointHandler(None, KerasCheckpoint(other), path)
    other.compile(keras.optimizers.Adam(0.01), "mse")
    with pytest.raises(ConfigError, match=r"shape of optimizer 2 is \(6, 16\) in the file, and \(6, 5\) here"):
        PreemptionCheckpointHandler(None, KerasCheckpoint(other), path)
    handler = PreemptionCheckpointHandler(None, checkpoint, path)
    with handler.watch_preemption_scope():
        assert handler.total_run_calls == 7


def case_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks():
    class Broken:
        def save(self, path):
            raise OSError("disk full")

        def restore(self, path):
            raise AssertionError

    handler = handler_of(Broken(), directory())
    expected = OSError if choros.rank() == 0 else StrategyError
    with pytest.raises(expected, match="disk full"), handler.watch_preemption_scope():
        signal_one_rank()


def case_bfloat16_is_restored():
    import ml_dtypes

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, dtype="bfloat16")])
    kernel = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    model.layers[0].kernel.assign(kernel)
    checkpoint, path = KerasCheckpoint(model), str(directory() / f"checkpoint-{choros.rank()}")
    checkpoint.save(path)
    model.layers[0].kernel.assign(0 * kernel)
    checkpoint.restore(path)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model.layers[0].kernel), kernel)


def case_models_without_variables_are_rejected():
    with pytest.raises(ConfigError, match=r"has no variables yet.*keras\.Input"):
        KerasCheckpoint(keras.Sequential([keras.layers.Dense(1)]))
