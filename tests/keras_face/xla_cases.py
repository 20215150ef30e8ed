"""Keras on JAX over all devices of all ranks; run by ``test_xla.py`` with the xla engine.

Rank 0 also trains a plain model on the whole data, on one device: the reference for all.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import keras
import numpy as np
import pytest
from jax.experimental import sparse

import choros.keras as hvd
from choros.comm.engines import xla
from choros.errors import ConfigError, MismatchError
from choros.topology import Topology
from choros.training.spmd_trainer import BatchPlan, count_examples
from keras_face.training_cases import (
    BATCH,
    CLASSES,
    FEATURES,
    assert_same_history,
    assert_same_on_all_ranks,
    build,
    callbacks,
    data,
    fit,
    order_dependent,
    shared_directory,
)

Arrays = tuple[np.ndarray, ...]


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def on_rank_0(train: Callable[[], object]) -> object:
    """Runs ``train`` on rank 0, and returns its result on all ranks."""
    return hvd.broadcast_object(train() if hvd.rank() == 0 else None)


def trained_plainly(optimizer: Callable[[], object], arrays: Arrays, epochs: int) -> list[np.ndarray]:
    """Returns the weights of a plain model that rank 0 trains on the whole data, on all ranks."""

    def plainly() -> list[np.ndarray]:
        plain = build(optimizer=optimizer())
        fit(plain, *arrays, batch_size=BATCH, epochs=epochs, callbacks=[])
        return plain.get_weights()

    return on_rank_0(plainly)


def part(arrays: Arrays, batch_size: int = BATCH) -> keras.utils.PyDataset:
    return hvd.shard(arrays, batch_size=batch_size)


def check_transparent(
    build_with: Callable[[object], keras.Model], optimizer: Callable[[], object], arrays: Arrays, epochs: int
) -> None:
    """Checks that training on all devices has the same final state and metrics as training on one."""

    def plainly() -> object:
        plain = build_with(optimizer())
        weight = {"sample_weight": arrays[2]} if len(arrays) > 2 else {}
        history = fit(plain, *arrays[:2], batch_size=BATCH, epochs=epochs, callbacks=[], **weight)
        return plain.get_weights(), history

    expected, theirs = on_rank_0(plainly)
    model = build_with(hvd.DistributedOptimizer(optimizer()))
    ours = fit(model, part(arrays), epochs=epochs)
    assert_close(model, expected)
    assert_same_on_all_ranks(model)
    assert_same_history(ours, theirs)


def assert_close(model: keras.Model, expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def case_twenty_steps_are_those_of_one_device():
    """Five batches an epoch, of which the last has 11 examples for all devices."""
    assert xla.mesh().size == hvd.size() * jax.local_device_count()
    check_transparent(order_dependent, momentum, data(), epochs=4)


def case_a_batch_smaller_than_the_devices():
    check_transparent(order_dependent, momentum, data(3), epochs=2)


def case_a_loss_of_the_whole_batch_with_weighted_examples():
    """The loss is no mean over examples, so example weights cannot exclude padding."""

    def dice(truth, prediction):
        prediction = keras.ops.softmax(prediction)
        return 1 - 2 * keras.ops.sum(truth * prediction) / keras.ops.sum(truth + prediction)

    x, y = data(11)
    arrays = (x, np.eye(CLASSES, dtype="float32")[y], np.linspace(0.5, 2, len(x), dtype="float32"))
    check_transparent(lambda optimizer: order_dependent(optimizer, loss=dice), momentum, arrays, epochs=3)


def case_accumulation_with_clipping():
    make = lambda: keras.optimizers.Adam(0.01, clipnorm=0.2, gradient_accumulation_steps=2)  # noqa: E731
    check_transparent(lambda optimizer: build(optimizer=optimizer, steps_per_execution=2), make, data(64), epochs=1)


def case_ratio_metrics_and_validation():
    def binary(optimizer):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
        return model

    x, y = data(2 * BATCH)
    arrays = (x, (y > 0).astype("float32")[:, None])
    held_out = tuple(array[:11] for array in arrays)
    settings = {"batch_size": BATCH, "validation_data": held_out, "callbacks": [], "epochs": 2}
    theirs = on_rank_0(lambda: fit(binary(momentum()), *arrays, **settings))
    model = binary(hvd.DistributedOptimizer(momentum()))
    more = callbacks(hvd.callbacks.Throughput())
    ours = fit(model, part(arrays), validation_data=part(held_out), callbacks=more, epochs=2)
    assert_same_history(ours, theirs)
    assert round(ours["images_per_s"][-1] * ours["epoch_s"][-1]) == len(x)


class Decay(keras.callbacks.Callback):
    """A learning rate for each batch, which a rank without a batch does not set."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.2 / (1 + batch)

    def on_train_batch_end(self, batch, logs=None):
        """Keeps Keras from calling callbacks in other threads."""


def case_ranks_with_different_numbers_of_batches():
    x, y = data(11)

    def plainly():
        plain = build(optimizer=momentum())
        for rows, rate in (([0, 1, 2, 3, 8, 9, 10], 0.2), ([4, 5, 6, 7], 0.1)) * 2:
            plain.optimizer.learning_rate = rate
            plain.train_on_batch(x[rows], y[rows])
        return plain.get_weights()

    expected = on_rank_0(plainly)
    start, end = (0, 8) if hvd.rank() == 0 else (8, 11)
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(momentum()))
    history = fit(model, x[start:end], y[start:end], batch_size=4, epochs=2, callbacks=callbacks(Decay()))
    assert_close(model, expected)
    assert_same_on_all_ranks(model)
    assert hvd.allgather_object(history) == [history] * hvd.size()


def case_evaluate_and_predict_are_local():
    """In the order of the data; one rank may call them alone."""
    x, y = data(11)
    plain, model = order_dependent("sgd"), order_dependent(hvd.DistributedOptimizer(momentum()))
    for each in (plain, model):
        each.set_weights([np.random.default_rng(2).uniform(0.5, 1.5, weight.shape) for weight in each.weights])
    expected = plain.predict(x, verbose=0)
    start, end = hvd.shard_range(len(x), hvd.rank(), hvd.size())
    rows = model.predict(x[start:end], batch_size=4, verbose=0, callbacks=callbacks())
    np.testing.assert_allclose(rows, expected[start:end], rtol=1e-5, atol=1e-6)
    if hvd.rank() == 1:
        results = model.evaluate(x, y, verbose=0)
        np.testing.assert_allclose(results, plain.evaluate(x, y, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(model.predict_on_batch(x), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-6)


def case_training_continues_from_the_checkpoint_of_one_rank():
    """Keras' callback saves on one rank; all load the file, and end as an uninterrupted run."""
    path = shared_directory() / "xla.keras"
    arrays = data(BATCH)

    expected = trained_plainly(momentum, arrays, epochs=2)
    model = build(optimizer=hvd.DistributedOptimizer(momentum()))
    saves = [keras.callbacks.ModelCheckpoint(path)] if hvd.rank() == 0 else []
    fit(model, part(arrays), epochs=1, callbacks=callbacks(*saves))
    hvd.barrier()
    loaded = hvd.load_model(path)
    fit(loaded, part(arrays), epochs=2, initial_epoch=1)
    assert_close(loaded, expected)
    assert_same_on_all_ranks(loaded)


def case_backward_passes_and_sum():
    accumulating = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    expected = trained_plainly(accumulating, data(2 * BATCH), epochs=1)
    rate = 0.1 / hvd.size() / 2
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), op=hvd.Sum, backward_passes_per_step=2)
    model = build(optimizer=optimizer)
    fit(model, part(data(2 * BATCH)), epochs=1)
    assert_close(model, expected)


def case_overflow_on_one_rank_is_skipped_on_all():
    x, y = data(12)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = build(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    finally:
        keras.config.set_dtype_policy("float32")
    before = model.get_weights()
    start, end = hvd.shard_range(12, hvd.rank(), hvd.size())
    bad = np.full_like(x, 1e38) if hvd.rank() == 1 else x
    fit(model, bad[start:end], y[start:end], batch_size=12, epochs=1)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(model.optimizer.dynamic_scale.numpy()) == model.optimizer.initial_scale / 2


def case_early_stopping_decides_identically():
    x, y = data(60)
    start, end = hvd.shard_range(len(x), hvd.rank(), hvd.size())
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
    history = fit(model, x[start:end], y[start:end], epochs=30, validation_split=0.3, callbacks=callbacks(stop))
    assert len(history["loss"]) < 30
    assert hvd.allgather_object(history) == [history] * hvd.size()
    assert_same_on_all_ranks(model)


def case_compiled_again():
    """In eager mode gradients are reduced through the host; with a plain optimizer a rank trains alone."""
    arrays = data(BATCH)

    expected = trained_plainly(momentum, arrays, epochs=2)
    model = build(optimizer=hvd.DistributedOptimizer(momentum()))
    fit(model, part(arrays), epochs=1)
    model.compile(optimizer=model.optimizer, loss=model.loss, run_eagerly=True)
    fit(model, part(arrays), epochs=1)
    assert_close(model, expected)
    model.compile(optimizer=momentum(), loss=model.loss)
    if hvd.rank() == 0:
        fit(model, *arrays, epochs=1, callbacks=[])


def case_batches_of_different_shapes_are_an_error_on_all_ranks():
    model = keras.Sequential([keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(momentum()), loss="mse")
    with pytest.raises(MismatchError, match=r"rank 1: batch\(float32\[\*, 4, 2\]"):
        fit(model, np.zeros((2, 3 + hvd.rank(), 2), "float32"), np.zeros((2, 1), "float32"), epochs=1)


def case_a_rank_has_its_own_devices():
    assert hvd.pin_device() == "cpu"
    assert [device.process_index for device in xla.mesh().devices.flat] == [0, 0, 1, 1]


def case_plans_of_batches():
    even = BatchPlan((4, 4), (2, 2))
    assert (even.rows, even.is_even, even.index().tolist()) == (2, True, list(range(8)))
    shifted = BatchPlan((6, 2), (1, 1))
    assert (shifted.rows, shifted.is_even, shifted.index().tolist()) == (6, False, list(range(8)))
    unequal = BatchPlan((0, 5), (1, 3))
    assert (unequal.rows, unequal.is_even, unequal.index().tolist()) == (2, False, [2, 3, 4, 5, 6])
    assert BatchPlan((1, 1), (2, 1)).index().tolist() == [0, 2]


def case_batches_that_cannot_be_sharded_are_errors():
    for batch, text in (
        ((np.zeros((2, 3)), np.zeros(3)), "have 2, 3 examples"),
        ((np.zeros((0, 3)), None), "have 0 examples"),
        (({"x": np.zeros(())},), "no number of examples"),
        ((sparse.BCOO.fromdense(np.eye(3)),), "sparse"),
    ):
        with pytest.raises(ConfigError, match=text):
            count_examples(batch)


def case_accelerators_are_assigned_to_local_ranks():
    position = Topology.from_hosts(["a", "a"], rank=1)
    for environ, expected in (
        ({}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [0]),
        ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, None),
    ):
        assert xla._local_devices(position, environ) == expected
    assert xla._local_devices(Topology.from_hosts(["a", "b"], rank=1), {}) is None
