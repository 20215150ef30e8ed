"""Synchronised batch normalisation on several ranks, against plain Keras in one process on the whole data.

The last of four batches has one row, of which one rank gets none.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import pytest

import choros
import choros.keras as hvd
from choros import distribute
from choros.arrays import adapter_of
from choros.errors import ConfigError, MismatchError
from choros.parallel.moments import RankMoments
from choros.settings import current
from ranks.reference import of_one_rank
from training import loss_cases
from training.loss_cases import (
    BACKEND,
    BATCH,
    JIT,
    MSE,
    STEPS,
    N,
    assert_same,
    assert_same_results,
    fit,
    numbers,
    strategy,
    tokens,
    weights,
)
from training.matrix_cases import apply_gradients

SHAPE = (3, 3, 2)


def plain(**kwargs: Any) -> keras.layers.Layer:
    return keras.layers.BatchNormalization(momentum=0.8, **kwargs)


def synchronized(**kwargs: Any) -> keras.layers.Layer:
    return plain(synchronized=True, **kwargs)


def horovods(**kwargs: Any) -> keras.layers.Layer:
    return hvd.SyncBatchNormalization(momentum=0.8, **kwargs)


def images(normalize: Any, kind: type = keras.Model, optimizer: Any = None) -> keras.Model:
    """Convolutions and pooling with two normalisations, whose messages must keep their order."""
    keras.utils.set_random_seed(1)
    x = keras.Input(SHAPE)
    hidden = keras.layers.Conv2D(4, 2, use_bias=False)(x)
    hidden = keras.layers.Activation("tanh")(normalize()(hidden))
    hidden = keras.layers.MaxPooling2D(2, strides=1, padding="same")(hidden)
    hidden = keras.layers.Dense(3)(hidden)
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(normalize(center=False)(hidden)))
    model = kind(x, outputs)
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.5), MSE(), jit_compile=JIT)
    return model


def check(make: Any, *args: Any, **fit_args: Any) -> None:
    loss_cases.check(lambda: make(synchronized), *args, plain=lambda: make(plain), **fit_args)


def case_fit():
    x, y = numbers(N, *SHAPE) * 2 + 3, numbers(N, 2, seed=1)
    check(images, x, y, validation_data=(x[:21], y[:21]))


def case_batches_of_one_row_in_a_stream():
    """One rank has no rows of them, in convolutions neither, and goes on."""
    x, y = numbers(N, *SHAPE) * 2 + 3, numbers(N, 2, seed=1)

    def stream():
        while True:
            yield from ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, N, BATCH))

    def twice():
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat(2)

    def make(normalize):
        model = images(normalize)
        model.compile(model.optimizer, MSE(reduction="sum"), metrics=["mae"], jit_compile=JIT)
        model.optimizer.learning_rate.assign(0.002)
        return model

    def trained(model, data, steps):
        history = fit(model, data(), batch_size=None, steps_per_epoch=steps, epochs=2 if steps else 1)
        results = model.evaluate(data(), steps=steps, verbose=0, return_dict=True)
        return weights(model), history, results

    for data, steps in [(stream, 6), *([(twice, None)] if BACKEND == "tensorflow" else [])]:
        expected, history, results = of_one_rank(lambda data=data, steps=steps: trained(make(plain), data, steps))
        with strategy().scope():
            ours = make(synchronized)
        _, own_history, own_results = trained(ours, data, steps)
        assert_same(ours, expected, (own_history, history))
        assert_same_results(own_results, results)


def case_fit_with_accumulation_and_a_sum():
    def make(normalize):
        model = images(normalize)
        optimizer = keras.optimizers.SGD(0.003, gradient_accumulation_steps=2)
        model.compile(optimizer, MSE(reduction="sum"), metrics=["mae"], jit_compile=JIT)
        return model

    check(make, numbers(N, *SHAPE), numbers(N, 2, seed=1))


def case_masked_sequences_and_renormalization():
    """Only unmasked steps count; some sequences end on one rank alone."""
    for arguments in ({}, {"renorm": True, "renorm_momentum": 0.5}):

        def make(normalize, arguments=arguments):
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Embedding(7, 5, mask_zero=True), normalize(**arguments), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((STEPS,), dtype="int32"), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=JIT)
            return model

        check(make, tokens(), numbers(N, STEPS, 1), epochs=2)


def case_other_axis_and_frozen_layer():
    def make(normalize):
        keras.utils.set_random_seed(1)
        frozen = normalize(name="frozen")
        frozen.trainable = False
        layers = [keras.layers.Conv1D(3, 1), normalize(axis=1), frozen, keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((4, 2)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
        return model

    check(make, numbers(N, 4, 2), numbers(N, 2, seed=1), epochs=2)


def case_horovods_face():
    x, y = numbers(N, *SHAPE) + 1, numbers(N, 2, seed=1)
    theirs = images(plain)
    expected = fit(theirs, x, y)
    for normalize in [horovods, *([synchronized] if BACKEND == "tensorflow" else [])]:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
        ours = images(normalize, optimizer=optimizer)
        start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        history = fit(ours, hvd.shard((x, y), batch_size=BATCH), batch_size=None, callbacks=start)
        assert_same(ours, weights(theirs), (history, expected))


class _Normalized(keras.layers.Layer):
    """Creates its layers when it is built: in the first step, on TensorFlow."""

    def __init__(self, normalize: Any) -> None:
        super().__init__()
        self.normalize = normalize

    def build(self, input_shape):
        self.inner = self.normalize()
        self.inner.build(input_shape)

    def call(self, x, training=None):
        return self.inner(x, training=training)


def case_a_layer_that_the_first_batch_creates():
    """Of a model without ``Input``, in Horovod's face."""

    def make(normalize, optimizer):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(3), _Normalized(normalize), keras.layers.Dense(2)])
        model.compile(optimizer, MSE(), jit_compile=JIT)
        return model

    x, y = numbers(N, 4) * 2 + 3, numbers(N, 2, seed=1)
    theirs = make(plain, keras.optimizers.SGD(0.1))
    expected = fit(theirs, x, y)
    ours = make(synchronized, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = fit(ours, hvd.shard((x, y), batch_size=BATCH), batch_size=None, callbacks=start)
    assert_same(ours, weights(theirs), (history, expected))


def case_buckets_that_are_sent_during_the_backward_pass():
    """On PyTorch their messages alternate with those of the layers, also on a rank that has joined."""
    if BACKEND != "torch":
        return
    with (
        patch("choros.settings._config", replace(current(), overlap=True)),
        patch("choros.parallel.reduce.plan._BUCKET_BYTES", 32),
    ):
        check(images, numbers(N, *SHAPE), numbers(N, 2, seed=1))


class OwnStep(keras.Model):
    """With a ``train_step`` of its own, which calls the model twice."""

    def train_step(self, *args):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(args[-1])
        if BACKEND == "jax":
            return self._jax_step(args[0], x, y)
        loss = apply_gradients(lambda: self._loss(x, y, lambda x: self(x, training=True)), self, self.optimizer)
        return {"loss": loss}

    def _loss(self, x, y, call):
        return keras.ops.mean(keras.ops.square(call(x) - y)) + 0.1 * keras.ops.mean(call(-x)[:, 0])

    def _jax_step(self, state, x, y):
        import jax

        trainable, others, moments, metrics = state

        def compute(trainable):
            updated = others

            def call(x):
                nonlocal updated
                outputs, updated = self.stateless_call(trainable, updated, x, training=True)
                return outputs

            return self._loss(x, y, call), updated

        (loss, others), gradients = jax.value_and_grad(compute, has_aux=True)(trainable)
        trainable, moments = self.optimizer.stateless_apply(moments, gradients, trainable)
        return {"loss": loss}, (trainable, others, moments, metrics)


def case_own_train_step():
    x, y = numbers(N, *SHAPE), numbers(N, 2, seed=1)
    with strategy().scope():
        ours = images(synchronized, OwnStep)
    theirs = images(plain, OwnStep)
    for model in (ours, theirs):
        fit(model, x, y)
    assert_same(ours, weights(theirs), ({}, {}))


def case_custom_loop():
    """The last batch has one row: one replica gets an empty batch."""
    x, y = numbers(N, *SHAPE) + 1, numbers(N, 2, seed=1)
    models = []
    for here, normalize in ((strategy(), synchronized), (None, plain)):
        with contextlib.nullcontext() if here is None else here.scope():
            model = images(normalize)
            model.optimizer.build(model.trainable_variables)
        models.append(model)
        _loop(model, here or distribute.get_strategy(), x, y)
    ours, theirs = models
    assert_same(ours, weights(theirs), ({}, {}))


def _loop(model: keras.Model, here: distribute.Strategy, x: np.ndarray, y: np.ndarray) -> None:
    batches: Any = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def loss_on(x, y, outputs):
        return choros.nn.compute_average_loss(keras.ops.mean(keras.ops.square(outputs - y), axis=-1))

    def step(batch):
        x, y = map(keras.ops.convert_to_tensor, batch)
        if BACKEND == "jax":
            return jax_step(x, y)
        return apply_gradients(lambda: loss_on(x, y, model(x, training=True)), model, model.optimizer)

    def jax_step(x, y):
        import jax

        def compute(trainable):
            others = [variable.value for variable in model.non_trainable_variables]
            outputs, others = model.stateless_call(trainable, others, x, training=True)
            return loss_on(x, y, outputs), others

        (loss, others), gradients = jax.value_and_grad(compute, has_aux=True)(
            [variable.value for variable in model.trainable_variables]
        )
        model.optimizer.apply(gradients, model.trainable_variables)
        for variable, value in zip(model.non_trainable_variables, others, strict=True):
            variable.assign(value)
        return loss

    def run(batch):
        return here.run(step, args=(batch,))

    if BACKEND == "tensorflow":
        run = tf.function(run, reduce_retracing=True)
    distributed = here.experimental_distribute_dataset(batches)
    for _ in range(3):
        for batch in distributed:
            run(batch)


def case_horovods_layer_in_a_loop():
    """All ranks' gradients have the same weight there."""
    if BACKEND == "jax":
        return  # the same collectives as in case_custom_loop
    x, y = numbers(6 * hvd.size(), *SHAPE), numbers(6 * hvd.size(), 2, seed=1)
    ours = images(horovods, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    theirs = images(plain, optimizer=keras.optimizers.SGD(0.1))
    start, end = hvd.shard_range(len(x), hvd.rank(), hvd.size())
    for model, rows in ((ours, slice(start, end)), (theirs, slice(None))):
        for _ in range(3):
            own = [keras.ops.convert_to_tensor(each[rows]) for each in (x, y)]
            loss = lambda: keras.ops.mean(keras.ops.square(model(own[0], training=True) - own[1]))  # noqa: B023,E731
            apply_gradients(loss, model, model.optimizer)
    assert_same(ours, weights(theirs), ({}, {}))


def case_gradients_that_are_summed():
    x, y = numbers(8 * hvd.size(), *SHAPE), numbers(8 * hvd.size(), 2, seed=1)
    ours = images(horovods, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 / hvd.size()), op=hvd.Sum))
    theirs = images(plain, optimizer=keras.optimizers.SGD(0.1))
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    fit(ours, hvd.shard((x, y), batch_size=8), batch_size=None, callbacks=start)
    fit(theirs, x, y, batch_size=8)
    assert_same(ours, weights(theirs), ({}, {}))


def case_the_gradient_of_a_gradient():
    """Of this rank's rows' moments, with respect to them: as of the moments of all rows in one array."""
    rank, size = choros.rank(), choros.size()
    rows = [numbers(3 + each, 2, seed=each) + 4 for each in range(size)]
    factors = numbers(2, seed=9)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        x, whole = tf.constant(rows[rank]), tf.constant(np.concatenate(rows))
        own = tf.function(lambda x: _penalty_tensorflow(tf, x, lambda x: _combined(x, tf.reduce_sum), factors))(x)
        expected = _penalty_tensorflow(tf, whole, lambda x: (_mean(x), _mean((x - _mean(x)) ** 2)), factors)
    elif BACKEND == "torch":
        import torch

        x, whole = (torch.tensor(each, requires_grad=True) for each in (rows[rank], np.concatenate(rows)))
        own = _penalty_torch(torch, x, lambda x: _combined(x, torch.sum), factors)
        expected = _penalty_torch(torch, whole, lambda x: (x.mean(0), x.var(0, correction=0)), factors)
    else:
        import jax

        def penalty(moments):
            gradient = jax.grad(lambda x: _cubes(*moments(x), factors))
            return jax.jit(jax.grad(lambda x: (gradient(x) ** 2).sum()))

        own = penalty(lambda x: _combined(x, jax.numpy.sum))(rows[rank])
        expected = penalty(lambda x: (x.mean(0), x.var(0)))(np.concatenate(rows))
    start = sum(map(len, rows[:rank]))
    # Each rank computes the whole penalty of its own rows, and every rank's loss counts once.
    expected = adapter_of(expected).to_host(expected)[start : start + len(rows[rank])]
    np.testing.assert_allclose(adapter_of(own).to_host(own), expected * size**2, rtol=1e-3, atol=1e-5)


def _mean(x: Any) -> Any:
    return keras.ops.mean(x, axis=0)


def _cubes(mean: Any, variance: Any, factors: np.ndarray) -> Any:
    terms = factors * (mean**3 + variance**2 * mean)
    return terms[0] + terms[1]


def _combined(x: Any, total: Any) -> Any:
    count = keras.ops.convert_to_tensor(float(x.shape[0]))
    mean = total(x, 0) / count
    return RankMoments().combine(count, mean, total((x - mean) ** 2, 0))


def _penalty_tensorflow(tf: Any, x: Any, moments: Any, factors: np.ndarray) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            value = _cubes(*moments(x), factors)
        gradient = inner.gradient(value, x)
        penalty = tf.reduce_sum(gradient**2)
    return outer.gradient(penalty, x)


def _penalty_torch(torch: Any, x: Any, moments: Any, factors: np.ndarray) -> Any:
    value = _cubes(*moments(x), torch.tensor(factors))
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return torch.autograd.grad((gradient**2).sum(), x)[0]


def case_different_numbers_of_channels_are_an_error():
    own = keras.ops.convert_to_tensor(np.ones(2 + choros.rank(), "float32"))
    with pytest.raises(MismatchError, match="different numbers of channels"):
        RankMoments().combine(keras.ops.convert_to_tensor(4.0), own, own)


def case_large_means():
    """A mean that is large beside the deviation leaves as many digits as in one process."""
    x = numbers(N, 2) + 3000
    start, end = hvd.shard_range(N, choros.rank(), choros.size())
    with strategy().scope():
        layer = synchronized()
    own = keras.ops.convert_to_tensor(x[start:end])
    strategy().run(lambda: layer(own, training=True))
    got = keras.ops.convert_to_numpy(layer.moving_variance)
    np.testing.assert_allclose(got, 0.8 + 0.2 * x.astype("float64").var(0), rtol=1e-4)


def case_layers_outside_of_steps_and_saved_ones():
    x = numbers(8, 3)
    expected = keras.ops.convert_to_numpy(plain()(x, training=True))
    with strategy().scope():
        layer = synchronized()
        assert layer.get_config()["synchronized"] is True
        again = keras.layers.BatchNormalization.from_config(layer.get_config())
    before = choros.global_process_set.communicator.collectives
    for each in (layer, again):
        each.build(x.shape)
        built = choros.global_process_set.communicator.collectives
        np.testing.assert_allclose(keras.ops.convert_to_numpy(each(x, training=True)), expected, rtol=1e-5)
        assert choros.global_process_set.communicator.collectives == built
    assert before <= built
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(horovods()))
    assert isinstance(restored, hvd.SyncBatchNormalization)
    with pytest.raises(ConfigError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)
