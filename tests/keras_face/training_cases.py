"""Training with Keras on several ranks equals training with plain Keras on one.

Run by ``test_training.py`` on 2 and 3 ranks of each framework. Every rank trains the distributed model, and a
plain one on the whole data as the reference: same start, same batches, no choros.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import keras
import numpy as np
import pytest

import choros.keras as hvd
from choros.errors import ConfigError, MismatchError
from choros.parallel.reduce.gradients import layout_of
from choros.settings import current
from choros.training.distributed_optimizer import reducer_of
from ranks.reference import of_one_rank

BACKEND = keras.backend.backend()
FEATURES, CLASSES, BATCH = 8, 3, 16
#: Five batches an epoch, the last with 11 examples; four epochs are 20 steps.
UNEVEN, EVEN = 75, 64


def data(n: int = UNEVEN, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, FEATURES)).astype("float32"), generator.integers(0, CLASSES, n)


def build(*, same_start: bool = True, **compile_args: object) -> keras.Model:
    """A small model; unless ``same_start``, ranks start with different weights."""
    keras.utils.set_random_seed(1 if same_start else 1 + hvd.rank())
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)]
    )
    compile_args.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    compile_args.setdefault("metrics", ["accuracy"])
    model.compile(**compile_args)
    return model


def order_dependent(optimizer: object, **compile_args: object) -> keras.Model:
    """A model whose result depends on which examples are in a batch, and on their order."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=3),
        keras.layers.Dense(CLASSES),
    ]
    model = keras.Sequential(layers)
    compile_args.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(optimizer=optimizer, metrics=["accuracy"], **compile_args)
    return model


def callbacks(*more: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), *more]


def fit(model: keras.Model, *args: object, epochs: int = 4, **kwargs: object) -> dict[str, list[float]]:
    kwargs.setdefault("callbacks", callbacks())
    return model.fit(*args, epochs=epochs, shuffle=False, verbose=0, **kwargs).history


@functools.cache
def reference(optimizer: str, n: int = UNEVEN, epochs: int = 4, batch_size: int = BATCH):
    """Returns the weights and history of plain Keras on the whole data; cached for several cases."""

    def trained():
        model = build(optimizer=OPTIMIZERS[optimizer]())
        history = fit(model, *data(n), batch_size=batch_size, epochs=epochs, callbacks=[])
        return weights(model), history

    return of_one_rank(trained)


def weights(model: keras.Model | list[np.ndarray]) -> list[np.ndarray]:
    if isinstance(model, list):
        return model
    return [np.array(keras.ops.convert_to_numpy(weight.value)) for weight in model.weights]


def assert_same_weights(model: keras.Model, expected: keras.Model | list[np.ndarray], rtol: float = 1e-4) -> None:
    for ours, theirs in zip(weights(model), weights(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol / 10)


def assert_same_on_all_ranks(model: keras.Model) -> None:
    """Bit for bit, the optimizer's state included."""
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        value = np.asarray(keras.ops.convert_to_numpy(variable.value))
        np.testing.assert_array_equal(value, hvd.broadcast(value, 0))


def assert_same_history(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-6, err_msg=name)


def communicator():
    return hvd.global_process_set.communicator


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "plain": lambda: keras.optimizers.SGD(0.12),
    "accumulating": lambda: keras.optimizers.Adam(0.01, clipnorm=0.2, gradient_accumulation_steps=2),
    "accumulating_sgd": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "accumulating_scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, name="sgd", gradient_accumulation_steps=2),
        initial_scale=1024.0,
        dynamic_growth_steps=3,
    ),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "adamw_ema": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.3, use_ema=True, ema_overwrite_frequency=3),
}


def case_an_optimizer_before_init_is_an_error():
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"call init\(\) once"):
        hvd.DistributedOptimizer("adam")
    hvd.init()


def case_a_fit_after_shutdown_is_an_error():
    models = [build(same_start=True, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD())) for _ in range(2)]
    fit(models[0], *data(BATCH))
    hvd.shutdown()
    try:
        for model in models:
            with pytest.raises(Exception, match=r"call init\(\) once"):
                model.fit(*data(BATCH), verbose=0)
    finally:
        hvd.init()


def check_transparent(optimizer: str, n: int, sharded: object, **fit_args: object) -> None:
    expected, theirs = reference(optimizer, n)
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS[optimizer]()))
    ours = fit(model, sharded, **fit_args)
    assert_same_weights(model, expected)
    assert_same_on_all_ranks(model)
    assert_same_history(ours, theirs)


# The first case: it broadcasts all existing models, of which ranks must have created the same.
def case_broadcast_variables_and_all_variables():
    models = [build(same_start=False, optimizer="adam") for _ in range(2)]
    hvd.broadcast_variables(models[0].weights, root_rank=1)
    for weight in models[0].weights:
        value = keras.ops.convert_to_numpy(weight.value)
        np.testing.assert_array_equal(value, hvd.broadcast(np.array(value), 1))
    hvd.broadcast_global_variables(0)
    for model in models:
        assert_same_on_all_ranks(model)


def case_a_normalization_that_one_rank_has_adapted():
    rows = np.random.default_rng(0).normal(3, 2, size=(8, 3)).astype("float32")
    layer = keras.layers.Normalization()
    model = keras.Sequential([keras.Input((3,)), layer])
    if hvd.rank() == 0:
        layer.adapt(rows)
    hvd.broadcast_variables(model.weights, root_rank=0)
    state = hvd.elastic.KerasState(model)
    for _ in range(2):
        outputs = keras.ops.convert_to_numpy(model(rows))
        np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(outputs.std(0), 1, atol=1e-5)
        layer.adapt(2 * rows)
        state.restore()


def case_a_model_that_is_frozen_when_it_is_broadcast_is_trained_later():
    """As the critic of a GAN, in a loop that calls a callback itself."""
    model = build(same_start=False)
    model.trainable = False
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    keras.callbacks.CallbackList(callbacks, model=model).on_train_begin()
    model.trainable = True
    before = model.get_weights()
    model.train_on_batch(np.ones((2, *model.input_shape[1:])), np.zeros(2))
    assert any((new != old).any() for new, old in zip(model.get_weights(), before, strict=True))
    assert_same_on_all_ranks(model)


def case_broadcast_variables_in_a_compiled_function():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    variables = [tf.Variable(1.0 * hvd.rank()), keras.Variable(2.0 * hvd.rank())]

    @tf.function
    def first_batch():
        for variable in variables:
            variable.assign(variable + 1.0)
        hvd.broadcast_variables(variables, root_rank=1)
        return variables[0] + variables[1]

    assert float(first_batch()) == 5.0
    assert [float(variable.numpy()) for variable in variables] == [2.0, 3.0]


def case_sgd_with_momentum_on_uneven_batches():
    check_transparent("sgd", UNEVEN, hvd.shard(data(), batch_size=BATCH))


def case_adam_with_global_clipnorm_on_uneven_batches():
    check_transparent("adam", UNEVEN, hvd.shard(data(), batch_size=BATCH))


def case_adamw_with_clipping_decay_and_moving_average():
    check_transparent("adamw_ema", UNEVEN, hvd.shard(data(), batch_size=BATCH))


def case_sgd_on_even_batches():
    check_transparent("sgd", EVEN, hvd.shard(data(EVEN), batch_size=BATCH))


def case_last_batch_smaller_than_the_number_of_ranks():
    n = 2 * BATCH + 1
    check_transparent("sgd", n, hvd.shard(data(n), batch_size=BATCH))


def case_gradients_that_are_reduced_where_they_are():
    """Large ones; here those of 64 bytes and more, in a last batch of one row, too."""
    n = 2 * BATCH + 1
    with patch.object(communicator(), "direct_bytes", 64):
        check_transparent("adam", n, hvd.shard(data(n), batch_size=BATCH))


def case_validation_metrics_are_over_all_examples():
    x, y = data(41, seed=5)
    plain = build(optimizer=OPTIMIZERS["sgd"]())
    theirs = fit(plain, *data(), batch_size=BATCH, validation_data=(x, y), callbacks=[])
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    ours = fit(model, hvd.shard(data(), batch_size=BATCH), validation_data=hvd.shard((x, y), batch_size=BATCH))
    assert_same_weights(model, plain)
    assert_same_history(ours, theirs)


def case_ratio_metrics_equal_those_of_one_process():
    metrics = lambda: [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]  # noqa: E731
    x, y = data()
    positive = (y > 0).astype("float32")[:, None]

    def binary(optimizer):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=metrics())
        return model

    theirs = fit(binary(OPTIMIZERS["sgd"]()), x, positive, batch_size=BATCH, callbacks=[])
    model = binary(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    assert_same_history(fit(model, hvd.shard((x, positive), batch_size=BATCH)), theirs)


def case_ranks_with_different_numbers_of_batches():
    """The split of the index range, with a batch size that leads to different numbers of batches."""
    x, y = data(50)
    ranges = [
        (0, 30),
        *[(30 + 20 * i // (hvd.size() - 1), 30 + 20 * (i + 1) // (hvd.size() - 1)) for i in range(hvd.size() - 1)],
    ]
    batches = [
        [(x[i : min(i + 8, end)], y[i : min(i + 8, end)]) for i in range(start, end, 8)] for start, end in ranges
    ]
    expected = build(optimizer=OPTIMIZERS["sgd"]())
    for _ in range(2):
        for step in range(len(batches[0])):
            parts = [mine[step] for mine in batches if step < len(mine)]
            expected.train_on_batch(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    start, end = ranges[hvd.rank()]
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    history = fit(model, x[start:end], y[start:end], batch_size=8, epochs=2)
    assert_same_weights(model, expected)
    assert_same_on_all_ranks(model)
    assert hvd.allgather_object(history) == [history] * hvd.size()


def case_ranks_with_different_numbers_of_batches_and_many_options():
    """Validation split, warm-up, plateau, accumulation and loss scale: ranks still end with the same state."""
    x, y = data(97)
    start, end = hvd.shard_range(len(x), hvd.rank(), hvd.size())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=3)
    model = build(same_start=False, optimizer=keras.optimizers.LossScaleOptimizer(optimizer))
    warmup = hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2)
    history = fit(
        model,
        x[start:end],
        y[start:end],
        batch_size=5 + 3 * hvd.rank(),
        validation_split=0.1,
        callbacks=callbacks(warmup, keras.callbacks.ReduceLROnPlateau(patience=1)),
    )
    assert_same_on_all_ranks(model)
    assert hvd.allgather_object(history) == [history] * hvd.size()


# ── data sets ────────────────────────────────────────────────────────────────────────────────────────


class Batches(keras.utils.PyDataset):
    """A user's own data set, batched for one process."""

    def __init__(self, n: int, **how: int) -> None:
        super().__init__(**how)
        self.x, self.y = data(n)

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index: int):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


def case_shard_of_a_py_dataset():
    check_transparent("sgd", UNEVEN, hvd.shard(Batches(UNEVEN)))


def case_shard_of_a_py_dataset_whose_last_batch_is_tiny():
    n = 2 * BATCH + 1
    check_transparent("sgd", n, hvd.shard(Batches(n), batch_size=BATCH))
    # Keras' workers have read more of it on the rank that has a row of that batch.
    check_transparent("sgd", n, hvd.shard(Batches(n, workers=2)))


def case_shard_of_tf_data():
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices(data())
    check_transparent("sgd", UNEVEN, hvd.shard(examples, batch_size=BATCH))
    assert hvd.allreduce(len(list(hvd.shard(examples))), op=hvd.Sum) == UNEVEN


def case_shard_of_a_torch_data_loader():
    import torch

    tensors = [torch.from_numpy(part) for part in data()]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), batch_size=BATCH)
    check_transparent("sgd", UNEVEN, hvd.shard(loader))


def case_shard_of_a_shuffled_torch_data_loader_sees_each_example_once():
    import torch

    loader = torch.utils.data.DataLoader(torch.arange(UNEVEN), shuffle=True, batch_size=1)
    part = hvd.shard(loader, batch_size=BATCH)
    for _ in range(2):
        mine = np.concatenate([batch.numpy() for batch in part])
        seen = hvd.allgather(mine)
        assert sorted(seen.tolist()) == list(range(UNEVEN))


def case_shards_of_torch_data_loaders_that_shuffle_go_on_in_one_order():
    import torch

    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    # Of the last batch the second rank has no row.
    tensors = torch.utils.data.TensorDataset(*(torch.from_numpy(part) for part in data(2 * BATCH + 1)))
    trained, held_out = (
        hvd.shard(torch.utils.data.DataLoader(tensors, BATCH, shuffle=True, generator=each)) for each in generators
    )
    drawn: list[np.ndarray] = []

    def note(batch, logs=None):
        if batch == 0:
            drawn.append(np.stack([each.get_state().numpy() for each in generators]))

    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
    watch.on_test_batch_begin = note
    model = build(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Your input ran out of data")  # which it would not be true of
        fit(model, trained, epochs=2, validation_data=held_out, callbacks=callbacks(watch))
    assert len(drawn) == 4
    np.testing.assert_array_equal(drawn, hvd.broadcast_object(drawn))
    assert len(trained) == len([*trained]) == 3 - hvd.rank()


def case_shard_of_a_torch_stream():
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(*(torch.from_numpy(part) for part in data()), strict=True))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=BATCH)
    check_transparent("sgd", UNEVEN, hvd.shard(loader, batch_size=BATCH))


def case_shard_of_grain():
    grain = pytest.importorskip("grain")
    examples = grain.MapDataset.source(list(zip(*data(), strict=True)))
    check_transparent("sgd", UNEVEN, hvd.shard(examples, batch_size=BATCH))
    check_transparent("sgd", UNEVEN, hvd.shard(examples.to_iter_dataset(), batch_size=BATCH))


def case_shard_shuffles_identically_on_all_ranks():
    x = np.arange(UNEVEN)
    part = hvd.shard(x, batch_size=BATCH, shuffle=True, seed=7)
    orders = []
    for _ in range(2):
        seen = hvd.allgather(np.concatenate([part[i] for i in range(len(part))]))
        assert sorted(seen.tolist()) == x.tolist()
        orders.append(seen.tolist())
        part.on_epoch_end()
    assert orders[0] != orders[1] != x.tolist()


def case_shuffling_by_keras_warns():
    for given in ((data(), 5), (Batches(10 * BATCH),)):
        model = build(optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
        with pytest.warns(UserWarning, match="shuffle=False to fit"):
            model.fit(hvd.shard(*given), epochs=2, verbose=0, callbacks=callbacks())


def case_shuffle_continues_after_resuming():
    def order(part: keras.utils.PyDataset) -> list[int]:
        return np.concatenate([part[i] for i in range(len(part))]).tolist()

    x = np.arange(UNEVEN)
    unbroken, resumed = (hvd.shard(x, batch_size=BATCH, shuffle=True, initial_epoch=epoch) for epoch in range(2))
    first = unbroken[0].tolist()
    unbroken.on_epoch_end()  # with steps_per_epoch: the next epoch goes on with this order
    assert order(unbroken)[: len(first)] == first
    unbroken.on_epoch_end()
    assert order(unbroken) == order(resumed)


def case_shard_of_arrays_is_the_index_split():
    x, y = data(10)
    start, end = hvd.shard_range(10, hvd.rank(), hvd.size())
    part = hvd.shard({"x": x, "y": [y, None]})
    np.testing.assert_array_equal(part["x"], x[start:end])
    np.testing.assert_array_equal(part["y"][0], y[start:end])


def case_shard_of_pandas_counts_rows_by_position():
    import pandas

    frame = pandas.DataFrame({"a": np.arange(UNEVEN)}).sample(frac=1, random_state=1)
    for shuffle in (False, True):
        part = hvd.shard((frame[["a"]].to_numpy(), frame["a"], frame), batch_size=BATCH, shuffle=shuffle)
        rows = [part[index] for index in range(len(part))]
        for arrays, series, table in rows:
            np.testing.assert_array_equal(arrays[:, 0], series)
            np.testing.assert_array_equal(arrays, table)
        assert sorted(hvd.allgather(np.concatenate([row[1] for row in rows])).tolist()) == list(range(UNEVEN))


def case_shard_of_invalid_data_is_an_error():
    with pytest.raises(ValueError, match="lengths"):
        hvd.shard((np.zeros(3), np.zeros(4)))
    with pytest.raises(ValueError, match="a batch size of 2 or more"):
        hvd.shard(np.zeros(3), batch_size=1)
    with pytest.raises(ValueError, match="PyDataset's batches have 16 examples"):
        hvd.shard(Batches(UNEVEN), batch_size=BATCH * 2)


# ── ways to train ────────────────────────────────────────────────────────────────────────────────────


def case_train_on_batch():
    x, y = data(EVEN)
    expected = build(optimizer=OPTIMIZERS["sgd"]())
    model = build(optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    n = 12
    start, end = hvd.shard_range(n, hvd.rank(), hvd.size())
    for step in range(5):
        expected.train_on_batch(x[step * n : (step + 1) * n], y[step * n : (step + 1) * n])
        model.train_on_batch(x[step * n + start : step * n + end], y[step * n + start : step * n + end])
    assert_same_weights(model, expected)


def case_compiled_with_xla():
    expected, _ = reference("sgd")
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), jit_compile=True)
    fit(model, hvd.shard(data(), batch_size=BATCH))
    assert_same_weights(model, expected)


def case_large_gradients_with_one_core_a_rank():
    # XLA copies a callback's large arguments on a thread of its pool: there must be one besides the callback's.
    for _ in range(3):
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(2048), keras.layers.Dense(CLASSES)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        model.fit(np.ones((32, 512), "float32"), np.ones((32, CLASSES)), batch_size=8, verbose=0, callbacks=callbacks())
        assert_same_on_all_ranks(model)


def case_run_eagerly():
    expected, _ = reference("sgd", epochs=1)
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), run_eagerly=True)
    fit(model, hvd.shard(data(), batch_size=BATCH), epochs=1)
    assert_same_weights(model, expected)


def case_several_steps_in_one_call():
    if BACKEND == "torch":
        return
    expected, _ = reference("sgd", EVEN)
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), steps_per_execution=2)
    fit(model, hvd.shard(data(EVEN), batch_size=BATCH))
    assert_same_weights(model, expected)


class OwnStep(keras.Model):
    """A model with its own ``train_step``, written for each framework."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)
        self.dense.build((None, FEATURES))
        self.built = True
        self.loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, x, training=None):
        return self.dense(x)

    def train_step(self, *args):
        return getattr(self, f"_{BACKEND}_step")(*args)

    def _tensorflow_step(self, batch):
        import tensorflow as tf

        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_function(y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        return {"own_loss": loss}

    def _torch_step(self, batch):
        import torch

        x, y = batch
        self.zero_grad()
        loss = self.loss_function(y, self(x, training=True))
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in self.trainable_weights], self.trainable_weights)
        return {"own_loss": loss}

    def _jax_step(self, state, batch):
        import jax

        trainable, other, optimizer, metrics = state
        x, y = batch

        def compute(trainable, other):
            prediction, other = self.stateless_call(trainable, other, x, training=True)
            return self.loss_function(y, prediction), other

        (loss, other), gradients = jax.value_and_grad(compute, has_aux=True)(trainable, other)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"own_loss": loss}, (trainable, other, optimizer, metrics)


def check_own_step(kind, optimizer):
    """Trains a model with a step of its own on uneven batches; returns its history."""

    def model_with(optimizer):
        keras.utils.set_random_seed(1)
        model = kind()
        model.compile(optimizer=optimizer)
        return model

    expected = model_with(OPTIMIZERS[optimizer]())
    fit(expected, *data(), batch_size=BATCH, callbacks=[])
    model = model_with(hvd.DistributedOptimizer(OPTIMIZERS[optimizer]()))
    history = fit(model, hvd.shard(data(), batch_size=BATCH))
    assert_same_weights(model, expected)
    return history


def case_own_train_step():
    history = check_own_step(OwnStep, "adam")
    assert hvd.allgather_object(history["own_loss"]) == [history["own_loss"]] * hvd.size()


def decorated(method):
    @functools.wraps(method)
    def wrapper(*args):
        return method(*args)

    return wrapper


class DecoratedStep(OwnStep):
    """A model whose ``train_step`` is wrapped by a decorator, as choros' would be."""

    train_step = decorated(OwnStep.train_step)


def case_decorated_train_step_on_uneven_batches():
    check_own_step(DecoratedStep, "sgd")


# ── arguments of DistributedOptimizer ────────────────────────────────────────────────────────────────


def case_accumulation_reduces_once_per_update():
    expected, _ = reference("accumulating", EVEN)
    model = build(optimizer=hvd.DistributedOptimizer(OPTIMIZERS["accumulating"]()))
    gc.collect()  # generators of earlier cases' data, whose states ranks would share
    before = communicator().collectives
    fit(model, hvd.shard(data(EVEN), batch_size=BATCH), callbacks=[hvd.callbacks.Throughput()])
    assert_same_weights(model, expected)
    # Each of 4 epochs has a control message for each of 4 micro-batches, the join and the orders of data, and the 2
    # collectives of Throughput. Ranks compare their variables after 2, 4 and 8 updates, two in an epoch, and after each
    # epoch.
    assert communicator().collectives - before == 4 * (4 + 2 + 2) + 3 + 4


def case_accumulation_over_uneven_batches():
    """Micro-batches have the same weight, whatever their sizes; those left over count in the next epoch."""
    for n in (UNEVEN, 2 * BATCH + 1):  # five batches, and three: a rank has none of the last
        check_transparent("accumulating", n, hvd.shard(data(n), batch_size=BATCH))


def case_a_loss_scale_that_grows_between_micro_batches():
    check_transparent("accumulating_scaled", UNEVEN, hvd.shard(data(UNEVEN), batch_size=BATCH))


def check_backward_passes(rate: float, n: int, *, average: bool) -> None:
    expected, _ = reference("accumulating_sgd", n)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    model = build(same_start=False, optimizer=optimizer)
    fit(model, hvd.shard(data(n), batch_size=BATCH))
    assert_same_weights(model, expected)


def case_backward_passes_per_step_averages_micro_batches():
    check_backward_passes(0.1, 2 * BATCH + 1, average=True)


def case_backward_passes_per_step_sums_micro_batches():
    for n in (EVEN, 2 * BATCH + 1):
        check_backward_passes(0.05, n, average=False)


def case_sum_predivide_and_groups():
    expected, _ = reference("plain", 60, batch_size=12)
    make = lambda rate, **kwargs: hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **kwargs)  # noqa: E731
    for optimizer in (
        make(0.12 / hvd.size(), op=hvd.Sum),
        make(0.12, gradient_predivide_factor=2.0),
        make(0.12, groups=2),
        make(0.12, num_groups=3),
    ):
        model = build(same_start=False, optimizer=optimizer)
        fit(model, hvd.shard(data(60), batch_size=12))
        assert_same_weights(model, expected)


def case_groups_of_variables():
    model = build(optimizer="sgd")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    first, *others = model.trainable_variables
    distributed = hvd.DistributedOptimizer(optimizer, groups=[[first], others])
    model.compile(optimizer=distributed, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model, hvd.shard(data(), batch_size=BATCH))
    expected, _ = reference("sgd")
    assert_same_weights(model, expected)


def case_gradients_sent_during_the_backward_pass():
    with (
        patch("choros.settings._config", replace(current(), overlap=True)),
        patch("choros.parallel.reduce.plan._BUCKET_BYTES", 256),
    ):
        check_transparent("adam", UNEVEN, hvd.shard(data(), batch_size=BATCH))
        wide = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    three = layout_of([np.zeros(64, np.float32)] * 3)
    assert reducer_of(wide).reducer.config.bucket_indices(three) == [(2,), (1,), (0,)]


def case_fp16_compression_is_close():
    expected, _ = reference("sgd")
    model = build(
        same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), compression=hvd.Compression.fp16)
    )
    fit(model, hvd.shard(data(), batch_size=BATCH))
    assert_same_weights(model, expected, rtol=2e-2)
    assert_same_on_all_ranks(model)


def case_process_set_trains_its_members_only():
    pair = hvd.add_process_set(range(hvd.size() - 1))
    try:
        if pair.included():
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), process_set=pair)
            model = build(optimizer=optimizer)
            x, y = data(24)
            start, end = hvd.shard_range(12, pair.rank(), pair.size())
            for step in range(2):
                model.train_on_batch(x[12 * step + start : 12 * step + end], y[12 * step + start : 12 * step + end])
            expected = build(optimizer=OPTIMIZERS["sgd"]())
            for step in range(2):
                expected.train_on_batch(x[12 * step : 12 * step + 12], y[12 * step : 12 * step + 12])
            assert_same_weights(model, expected)
        hvd.barrier()
    finally:
        assert hvd.remove_process_set(pair)


def case_local_variables_keep_their_own_gradient():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    shared, local = keras.Variable(np.zeros(2, "float32")), keras.Variable(np.zeros(2, "float32"))
    optimizer.build([shared, local])
    optimizer.register_local_var(local)
    gradient = keras.ops.full((2,), float(hvd.rank() + 1))
    optimizer.apply([gradient, gradient])
    mean = (hvd.size() + 1) / 2
    np.testing.assert_allclose(keras.ops.convert_to_numpy(shared.value), -mean)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(local.value), -(hvd.rank() + 1) / hvd.size())


def case_local_variables_are_accumulated_like_others():
    for average in (True, False):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        shared, local = keras.Variable(np.zeros(2, "float32")), keras.Variable(np.zeros(2, "float32"))
        optimizer.build([shared, local])
        optimizer.register_local_var(local)
        for gradient in (1.0, 5.0):
            optimizer.apply([keras.ops.full((2,), gradient)] * 2)
        total = 3.0 if average else 6.0
        np.testing.assert_allclose(keras.ops.convert_to_numpy(shared.value), -total, rtol=1e-6)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(local.value), -total / hvd.size(), rtol=1e-6)


def case_invalid_arguments_are_errors():
    adam = keras.optimizers.Adam
    for arguments, text in (
        ({"op": hvd.Max}, "Average or Sum"),
        ({"op": "Adasum"}, "op=Adasum: gradients can be reduced with Average or Sum only"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"backward_passes_per_step": 0}, "1 or more"),
        ({"groups": -1}, "0 or more"),
        ({"groups": [[1]]}, "build"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(adam(), **arguments)
    with pytest.raises(ValueError, match="both set gradient accumulation"):
        hvd.DistributedOptimizer(adam(gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="wrap it only once"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(adam()))
    with pytest.raises(ValueError, match="takes a keras"):
        hvd.DistributedOptimizer("adam")


def case_only_rank_0_shows_progress_unless_verbose_is_given(capsys):
    model = build(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()))
    model.fit(*data(EVEN), callbacks=callbacks())
    assert ("loss" in capsys.readouterr().out) == (hvd.rank() == 0)
    model.fit(*data(EVEN), callbacks=callbacks(), verbose=2)
    assert "loss" in capsys.readouterr().out


# ── mixed precision ──────────────────────────────────────────────────────────────────────────────────


def mixed(optimizer_of) -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return build(optimizer=optimizer_of())
    finally:
        keras.config.set_dtype_policy("float32")


def case_overflow_on_one_rank_is_skipped_on_all():
    """For every nesting of the loss scale and the distributed optimizer."""
    x, y = data(EVEN)
    bad = x.copy()
    if hvd.rank() == hvd.size() - 1:
        bad[:] = 1e38

    def wrapped_by_compile():
        keras.config.set_dtype_policy("float32")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        keras.config.set_dtype_policy("mixed_float16")
        return optimizer

    for optimizer_of in (
        wrapped_by_compile,
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
    ):
        model = mixed(optimizer_of)
        before = weights(model)
        part = hvd.shard_range(12, hvd.rank(), hvd.size())
        model.train_on_batch(bad[:2], y[:2])  # without a callback, which would prepare the model
        fit(model, bad[slice(*part)], y[slice(*part)], batch_size=12, epochs=1)
        for old, new in zip(before, weights(model), strict=True):
            np.testing.assert_array_equal(old, new)
        scale = float(model.optimizer.dynamic_scale.numpy())
        assert scale == model.optimizer.initial_scale / 4
        fit(model, x[slice(*part)], y[slice(*part)], batch_size=12, epochs=1)
        assert_same_on_all_ranks(model)


def case_mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    finally:
        keras.config.set_dtype_policy("float32")
    fit(model, hvd.shard(data(), batch_size=BATCH))
    assert_same_on_all_ranks(model)


# ── callbacks ────────────────────────────────────────────────────────────────────────────────────────


def case_weights_and_optimizer_state_are_equal_before_the_first_step():
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    model.optimizer.build(model.trainable_variables)
    for velocity in model.optimizer.momentums:
        velocity.assign(np.full(velocity.shape, 0.25 if hvd.rank() == 0 else 0.75))

    class Check(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                assert_same_on_all_ranks(self.model)
                assert float(keras.ops.max(self.model.optimizer.momentums[0])) == 0.25

    fit(model, hvd.shard(data(), batch_size=BATCH), epochs=1, callbacks=callbacks(Check()))


def case_early_stopping_and_plateau_decide_identically():
    x, y = data(60)
    start, end = hvd.shard_range(len(x), hvd.rank(), hvd.size())
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5)
    history = fit(
        model, x[start:end], y[start:end], epochs=30, validation_split=0.3, callbacks=callbacks(stop, plateau)
    )
    assert hvd.allgather_object(history) == [history] * hvd.size()
    assert_same_on_all_ranks(model)


def case_evaluate_passes_the_metrics_of_all_examples():
    x, y = data(41, seed=3)
    plain = build(optimizer="sgd")
    expected = plain.evaluate(x, y, verbose=0, batch_size=BATCH)
    model = build(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()))

    class Keep(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            self.logs = logs

    keep = Keep()
    model.evaluate(hvd.shard((x, y), batch_size=BATCH), verbose=0, callbacks=callbacks(keep))
    np.testing.assert_allclose([keep.logs["loss"], keep.logs["accuracy"]], expected, rtol=1e-5)


class Rates(keras.callbacks.Callback):
    """Keeps the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def case_warmup_raises_the_rate_of_one_rank_to_that_of_all():
    size = hvd.size()
    model = build(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * size)))
    rates = Rates()
    warmup = hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=1)
    fit(model, hvd.shard(data(EVEN), batch_size=BATCH), epochs=3, callbacks=callbacks(warmup, rates))
    expected = [0.1 * (1 + (step + 1) / 8 * (size - 1)) for step in range(8)] + [0.1 * size] * 4
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-5)


def case_schedule_by_epoch_within_its_bounds():
    model = build(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)))
    rates = Rates()
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=0.4, multiplier=lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3
    )
    history = fit(model, hvd.shard(data(EVEN), batch_size=EVEN), epochs=4, callbacks=callbacks(schedule, rates))
    np.testing.assert_allclose(rates.rates, [0.4, 0.2, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], [0.4, 0.2, 0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def case_momentum_correction_scales_the_velocity(name):
    model = build(optimizer=hvd.DistributedOptimizer(getattr(keras.optimizers, name)(0.4, momentum=0.9)))
    halve = hvd.callbacks.LearningRateScheduleCallback(multiplier=0.5)
    halve.set_model(model)
    halve.on_train_begin()
    halve.on_epoch_begin(0)  # before there are any
    assert float(model.optimizer.learning_rate) == pytest.approx(0.2)
    model.optimizer.learning_rate = 0.4
    model.optimizer.build(model.trainable_variables)
    velocities = [each for each in model.optimizer.variables if "momentum" in each.path]
    assert velocities
    for velocity in velocities:
        velocity.assign(np.ones(velocity.shape))
    halve.on_epoch_begin(1)
    for velocity in velocities:
        np.testing.assert_allclose(keras.ops.convert_to_numpy(velocity.value), 0.5)


def shared_directory() -> Path:
    """The directory all ranks were started in."""
    return Path(hvd.broadcast_object(str(Path.cwd())))


def case_best_model_is_saved_by_one_rank_and_loads_without_choros():
    path = shared_directory() / f"best-{BACKEND}-{{epoch}}.keras"
    model = build(optimizer=hvd.DistributedOptimizer(OPTIMIZERS["adam"]()))
    best = hvd.callbacks.BestModelCheckpoint("loss", 1, filepath=path)
    fit(model, hvd.shard(data(), batch_size=BATCH), epochs=2, callbacks=callbacks(best))
    hvd.barrier()
    files = sorted(file.name for file in shared_directory().glob(f"*best-{BACKEND}-*"))
    assert files == [f"best-{BACKEND}-1.keras", f"best-{BACKEND}-2.keras"]
    program = (
        "import os, sys\n"
        "sys.modules |= dict.fromkeys(os.environ['CHOROS_TEST_HIDDEN'].split())\n"
        "import keras, numpy as np\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        f"model.fit(np.zeros((4, {FEATURES})), np.zeros(4), verbose=0)\n"
        "assert type(model.optimizer).__module__.startswith('keras.'), type(model.optimizer)\n"
        "assert not any(name.startswith('choros') for name in sys.modules)\n"
    )
    if hvd.rank() == 0:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX", "PRTE"))}
        subprocess.run([sys.executable, "-c", program, str(path).format(epoch=2)], check=True, env=environ, timeout=300)
    hvd.barrier()


def case_best_model_checks_its_arguments_before_the_epoch():
    for arguments, text in (({"mode": "best"}, "auto, min, max"), ({"save_freq": 3}, "once per epoch")):
        with pytest.raises(ValueError, match=text):
            hvd.callbacks.BestModelCheckpoint(filepath="x.keras", **arguments)
    with pytest.raises(ValueError, match="filepath"):
        hvd.callbacks.BestModelCheckpoint().on_train_begin()


def check_load_model(ending: str) -> None:
    straight = build(optimizer=hvd.DistributedOptimizer(OPTIMIZERS["adam"]()))
    path = shared_directory() / f"half-{BACKEND}.{ending}"

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and hvd.rank() == 0:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "You are saving your model as an HDF5")
                    self.model.save(path)

    fit(straight, hvd.shard(data(), batch_size=BATCH), callbacks=callbacks(Save()))
    # Only rank 0 reads the file, as in Horovod's examples; the broadcast sends its state to the others.
    resumed = (
        hvd.load_model(path)
        if hvd.rank() == 0
        else build(same_start=False, optimizer=hvd.DistributedOptimizer(OPTIMIZERS["adam"]()))
    )
    fit(resumed, hvd.shard(data(), batch_size=BATCH), initial_epoch=2)
    assert_same_weights(resumed, straight, rtol=1e-5)
    assert_same_on_all_ranks(resumed)


def case_load_model_continues_the_saved_training():
    check_load_model("keras")


def case_load_model_continues_the_training_saved_in_an_h5_file():
    check_load_model("h5")


@pytest.mark.parametrize(("name", "shard_state"), [("sgd", False), ("plain", True)])
def case_backup_and_restore_on_rank_0_comes_before_the_broadcast(name, shard_state):
    path = shared_directory() / f"backup-{BACKEND}-{name}"

    def trained(*, last: bool = False, **fit_args: object) -> keras.Model:
        backups = [keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)] if hvd.rank() == 0 else []
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](), shard_state=shard_state)
        model = build(same_start=False, optimizer=optimizer)
        given = [*callbacks(), *backups] if last else [*backups, *callbacks()]
        fit(model, hvd.shard(data(), batch_size=BATCH), callbacks=given, **fit_args)
        return model

    trained(epochs=2)
    with pytest.raises(ConfigError, match=r"different epochs, \[2, 0.*BackupAndRestore, must come before"):
        trained(last=True)
    assert_same_weights(trained(), reference(name)[0])


def case_a_distributed_optimizer_is_saved_as_the_plain_one():
    for make in OPTIMIZERS.values():
        plain, ours = make(), make()
        ours.name = plain.name
        saved = keras.saving.serialize_keras_object(hvd.DistributedOptimizer(ours))
        assert saved == keras.saving.serialize_keras_object(plain)


def case_throughput_counts_all_examples():
    model = build(optimizer=hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    history = fit(
        model,
        hvd.shard(data(), batch_size=BATCH),
        validation_data=hvd.shard(data(20), batch_size=BATCH),
        callbacks=callbacks(hvd.callbacks.Throughput(verbose=1)),
        epochs=2,
    )
    for rate, seconds in zip(history["images_per_s"], history["epoch_s"], strict=True):
        assert rate * seconds == pytest.approx(UNEVEN)
    assert hvd.allgather_object(history["images_per_s"]) == [history["images_per_s"]] * hvd.size()


# ── collectives and variables ────────────────────────────────────────────────────────────────────────


def case_collectives_accept_variables_tensors_and_numbers():
    rank, size = hvd.rank(), hvd.size()
    tensor = keras.ops.full((2, 3), float(rank))
    mean = (size - 1) / 2
    for value in (tensor, keras.Variable(tensor), np.full((2, 3), float(rank), "float32")):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(hvd.allreduce(value)), np.full((2, 3), mean))
    assert type(hvd.allreduce(tensor)) is type(tensor)
    assert hvd.allreduce(rank) == mean
    assert hvd.allreduce(rank, op=hvd.Sum) == size * (size - 1) // 2
    assert hvd.broadcast(rank + 5, 1) == 6
    assert hvd.broadcast(0.5 * rank, root_rank=1, name="half") == 0.5
    np.testing.assert_array_equal(hvd.allgather(rank), np.arange(size))
    assert tuple(hvd.allgather(keras.ops.ones((rank, 2))).shape) == (size * (size - 1) // 2, 2)
    rows = keras.ops.convert_to_tensor(np.arange(size + 1, dtype="float32"))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(hvd.reducescatter(rows)), hvd.shard(np.arange(size + 1.0)))
    received, splits = hvd.alltoall(keras.ops.full((size,), float(rank)), splits=[1] * size)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(received), np.arange(size))
    assert np.asarray(splits).tolist() == [1] * size
    assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object("x" * rank) == ["x" * i for i in range(size)]
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="use op"):
        assert hvd.allreduce(1.0, average=False) == size


def case_pin_device_after_the_framework_has_started():
    keras.ops.convert_to_numpy(keras.ops.add(keras.ops.ones(3), keras.ops.ones(3)))
    assert hvd.pin_device() == "cpu"
    if BACKEND == "tensorflow":
        with pytest.raises(ConfigError, match=r"intra_op_threads=5 cannot be set.*before the script makes data sets"):
            hvd.pin_device(intra_op_threads=5)


def case_pin_device_after_accelerators_have_started(monkeypatch):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        def started(*_):
            raise RuntimeError("Visible devices cannot be modified after being initialized")

        monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: ["gpu"])
        monkeypatch.setattr(tf.config, "set_visible_devices", started)
    elif BACKEND == "jax":
        import jax

        monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")] * 2)
    else:
        return  # PyTorch's current device can be set at any time
    with pytest.raises(ConfigError, match=r"the device gpu:\d of this process cannot be set.*before the script makes"):
        hvd.pin_device()


def case_model_built_by_the_first_batch():
    """On TensorFlow weights are broadcast after the first batch, as in Horovod; elsewhere before it."""
    keras.utils.set_random_seed(1 + hvd.rank())
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"])
    first = fit(model, hvd.shard(data(EVEN), batch_size=BATCH))["loss"]
    assert first[-1] < first[0]
    assert_same_on_all_ranks(model)


def case_gradients_of_different_variables_are_not_averaged():
    variables, gradient = [keras.Variable(np.ones(3, "float32")) for _ in range(2)], keras.ops.ones(3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build(variables)
    own = min(hvd.rank(), 1)
    with pytest.raises(MismatchError, match=r"float32\[3\] of variable 1"):
        optimizer.apply([gradient, None][:: 1 - 2 * own], variables)
    with pytest.raises(MismatchError, match=r"float32\[3\] of variable 1"):
        optimizer.apply([gradient], [variables[own]])
    optimizer.apply([gradient], variables[:1])
    assert [keras.ops.convert_to_numpy(variable)[0] for variable in variables] == [0.5, 1.0]


def case_ranks_that_start_from_different_weights_are_told_so():
    """Without a broadcast ranks average the gradients of different models: an error on all of them, not silence."""
    model = build(same_start=False, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    expected = r"after step 2, ranks have different values of 2 of 4 .*'sequential/dense\w*/kernel'"
    with pytest.raises(Exception, match=expected):
        fit(model, *data(EVEN), batch_size=BATCH, callbacks=[hvd.callbacks.MetricAverageCallback()])


def case_a_local_variable_may_differ():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = build(optimizer=optimizer)
    for variable in model.layers[0].trainable_variables:
        optimizer.register_local_var(variable)
        variable.assign(variable + hvd.rank())
    fit(model, *data(EVEN), batch_size=BATCH, callbacks=[hvd.callbacks.MetricAverageCallback()])


def case_the_way_of_a_step_is_short() -> None:
    """What a reader of one step's host call goes through: ten files, sixty functions."""
    import tensorflow as tf

    own, steps = str(Path(hvd.__file__).parents[1]), []
    numpy_function = tf.numpy_function

    def note(frame: object, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(own):
            steps[-1].append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def noted(function: object, *args: object) -> object:
        def on_host(*hosts: object) -> object:
            steps.append([])
            before = sys.getprofile()
            sys.setprofile(note)
            try:
                return function(*hosts)
            finally:
                sys.setprofile(before)

        return numpy_function(on_host, *args)

    model = build(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, hvd.shard(data(EVEN), batch_size=BATCH), epochs=1)
    with patch.object(tf, "numpy_function", noted):
        model.make_train_function(force=True)
        for _ in range(20):  # on a busy machine, most of them wait for the other rank, by further calls
            model.train_on_batch(*data(BATCH))
    shortest = min(steps, key=len)  # a thread's first call has one more
    assert 10 < len(shortest) <= 60, shortest
    assert len({file for file, _ in shortest}) <= 10, shortest


def case_ranks_that_train_apart(caplog):
    """As its optimizer is not distributed; one that makes the same updates on all of them is not warned of."""
    x, y = data()
    own = slice(hvd.rank(), None, hvd.size())
    for rows, expected in ((own, hvd.rank() == 0), (slice(None), False)):
        caplog.clear()
        model = build(same_start=False)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x[rows], y[rows], batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        assert len([each for each in caplog.messages if "trains the model" in each]) == expected


def case_random_layers_draw_on_from_one_place_though_ranks_had_different_numbers_of_batches():
    keras.utils.set_random_seed(1)
    dropout = keras.layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input((FEATURES,)), dropout, keras.layers.Dense(CLASSES)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callbacks, rows = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], 12 if hvd.rank() == 0 else 5
    x, y = np.ones((rows, FEATURES), "float32"), np.ones((rows, CLASSES), "float32")
    for epochs in (1, 2):
        model.fit(x, y, batch_size=4, epochs=epochs, validation_data=(x[:4], y[:4]), verbose=0, callbacks=callbacks)
    states = hvd.allgather(keras.ops.convert_to_numpy(dropout.seed_generator.state.value).astype("int64")[None])
    assert np.asarray(states).tolist() == [[3, 3 * 3]] * hvd.size()
