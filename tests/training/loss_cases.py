"""Losses and metrics that do not simply divide by the number of rows, on several ranks and on one.

Run by ``test_losses.py`` on two ranks of each framework, and on three. All train a model under a strategy, one rank
a plain one on the whole data as the reference. The last of four batches has one row, of which one replica gets none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import choros
import choros.keras as hvd
from choros import distribute
from choros.data import rows as data_rows
from choros.errors import ConfigError
from choros.parallel.objects import broadcast_object
from choros.training.replaced import replaced
from ranks.reference import of_one_rank
from training.matrix_cases import OwnStep, apply_gradients

BACKEND = keras.backend.backend()
JIT = False if BACKEND == "tensorflow" else "auto"
FEATURES, STEPS, CLASSES, BATCH, N = 5, 4, 3, 16, 49
Make = Callable[[], keras.Model]
History = dict[str, list[float]]


@functools.cache
def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def dense(loss: Any, **compile_args: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]
    )
    compile_args = {"optimizer": keras.optimizers.SGD(0.05), "jit_compile": JIT, **compile_args}
    model.compile(loss=loss, **compile_args)
    return model


def masked(loss: Any, rate: float = 0.1, **metrics: Any) -> keras.Model:
    """Sequences of different lengths: Keras divides by the number of unmasked steps."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            keras.layers.Embedding(7, FEATURES, mask_zero=True),
            keras.layers.SimpleRNN(6, return_sequences=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(rate), loss, **metrics, jit_compile=JIT)
    return model


def tokens(n: int = N) -> np.ndarray:
    generator = np.random.default_rng(0)
    ids = generator.integers(1, 7, (n, STEPS))
    return np.where(np.arange(STEPS) < generator.integers(1, STEPS + 1, (n, 1)), ids, 0).astype("int32")


def fit(model: keras.Model, *args: Any, **kwargs: Any) -> History:
    return model.fit(*args, **{"epochs": 3, "batch_size": BATCH, "shuffle": False, "verbose": 0, **kwargs}).history


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(weight.value)) for weight in model.weights]


def assert_same(ours: keras.Model, expected_weights: list[np.ndarray], histories: tuple[History, History]) -> None:
    for mine, expected in zip(weights(ours), expected_weights, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(mine, broadcast_object(mine), err_msg="processes have different weights")
    assert_same_results(*histories)


def assert_same_results(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def check(make: Make, *args: Any, evaluate: bool = True, plain: Make | None = None, **fit_args: Any) -> None:
    """Trains and evaluates under a strategy on all ranks, and in plain Keras, by default the same model, on one."""

    def trained(model: keras.Model) -> tuple[list[np.ndarray], History, dict[str, Any]]:
        history, results = fit(model, *args, **fit_args), {}
        if evaluate:
            sample_weight = fit_args.get("sample_weight")
            results = model.evaluate(*args, sample_weight=sample_weight, batch_size=BATCH, verbose=0, return_dict=True)
        return weights(model), history, results

    expected, history, results = of_one_rank(lambda: trained((plain or make)()))
    with strategy().scope():
        ours = make()
    _, own_history, own_results = trained(ours)
    assert_same(ours, expected, (own_history, history))
    assert_same_results(own_results, results)


def check_horovod(make: Make, data: Any, batch_size: int | None = BATCH, **reduction: Any) -> None:
    """Trains with ``DistributedOptimizer`` on this rank's rows, and in plain Keras on all of them."""
    theirs, arrays = make(), isinstance(data, tuple)
    history = fit(theirs, *(data if arrays else (data,)), batch_size=batch_size if arrays else None)
    ours = make()
    ours.optimizer = hvd.DistributedOptimizer(ours.optimizer, **reduction)
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    part = hvd.shard(data, batch_size=batch_size)
    own_history = fit(ours, part, batch_size=None, callbacks=start)
    assert_same(ours, weights(theirs), (own_history, history))


MSE = keras.losses.MeanSquaredError


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────


def case_sum():
    check(
        lambda: dense(MSE(reduction="sum"), optimizer=keras.optimizers.SGD(0.002)), numbers(N, FEATURES), numbers(N, 2)
    )


def case_mean_with_sample_weight():
    weight = np.linspace(0.1, 3.0, N).astype("float32")
    weight[16:24] = 0.0  # all that one of two replicas has of the second batch
    make = lambda: dense(MSE(reduction="mean_with_sample_weight"), weighted_metrics=["mae"])  # noqa: E731
    check(make, numbers(N, FEATURES), numbers(N, 2), sample_weight=weight)


def case_class_weights():
    def make(reduction="mean_with_sample_weight"):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        return dense(loss, weighted_metrics=["accuracy"])

    labels = np.random.default_rng(0).integers(0, 2, N)
    check(make, numbers(N, FEATURES), labels, class_weight={0: 0.2, 1: 3.0}, evaluate=False)


def case_masked_sequences():
    check(lambda: masked("mse", metrics=["mae"], weighted_metrics=["mse"]), tokens(), numbers(N, STEPS, 1))


def case_masked_sequences_with_sample_weights():
    _check_masked("mean_with_sample_weight", weighted=True)


def case_masked_sequences_of_other_reductions():
    _check_masked("sum_over_batch_size", weighted=True)
    _check_masked("sum", weighted=False)


def _check_masked(reduction: str, *, weighted: bool) -> None:
    # Without weighted metrics: on torch, Keras changes a batch's weights while it computes the loss.
    weight = np.repeat(np.linspace(0.1, 3.0, N).astype("float32")[:, None], STEPS, axis=1) if weighted else None
    make = lambda: masked(MSE(reduction=reduction), 0.001 if reduction == "sum" else 0.1)  # noqa: E731
    check(make, tokens(), numbers(N, STEPS, 1), sample_weight=weight, epochs=1)


class Twice(keras.utils.PyDataset):
    """Has a batch of one row in the middle."""

    def __init__(self, *arrays: np.ndarray) -> None:
        super().__init__()
        self.arrays = arrays

    def __len__(self) -> int:
        return 2 * -(-N // BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        start = index % (len(self) // 2) * BATCH
        return tuple(array[start : start + BATCH] for array in self.arrays)


def case_masks_and_weights_of_a_batch_of_one_row_in_the_middle():
    weight = np.repeat(np.linspace(0.1, 3.0, N).astype("float32")[:, None], STEPS, axis=1)
    check(
        lambda: masked(MSE(reduction="mean_with_sample_weight"), metrics=["mae", Extremes()], weighted_metrics=["mse"]),
        Twice(tokens(), numbers(N, STEPS, 1), weight),
        batch_size=None,
    )


def case_outputs_with_different_reductions():
    def make():
        keras.utils.set_random_seed(1)
        x = keras.Input((FEATURES,))
        hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(x)
        outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b", "c")}
        model = keras.Model(x, outputs)
        losses = {"a": MSE(reduction="sum"), "b": MSE(reduction="mean_with_sample_weight"), "c": "mae"}
        weights = {"a": 0.02, "b": 0.7, "c": 1.3}
        model.compile(keras.optimizers.SGD(0.05), losses, weights, metrics={"c": ["mse"]}, jit_compile=JIT)
        return model

    targets = {name: numbers(N, 1, seed=seed) for seed, name in enumerate("abc")}
    weights = {name: np.linspace(low, 2.0, N).astype("float32") for low, name in ((1.0, "a"), (0.1, "b"), (1.0, "c"))}
    check(
        make,
        numbers(N, FEATURES),
        targets,
        sample_weight=weights,
        validation_data=(numbers(9, FEATURES), {k: v[:9] for k, v in targets.items()}),
    )


def case_added_loss_that_is_a_mean():
    class Activity(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
            return x

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(4), Activity(), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), MSE(reduction="sum_over_batch_size"), jit_compile=JIT)
        return model

    check(make, numbers(N, FEATURES), numbers(N, 2))


def case_activity_regularizers():
    """Keras divides them by the rows that the layer is given, unless there are none."""

    def make():
        keras.utils.set_random_seed(1)
        shared = keras.layers.Dense(FEATURES, activation="tanh", activity_regularizer="l2")
        model = keras.Sequential([keras.Input((FEATURES,)), shared, keras.layers.Dense(2, activity_regularizer="l1")])
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=JIT)
        return model

    check(make, numbers(N, FEATURES), numbers(N, 2))
    check_horovod(make, (numbers(N, FEATURES), numbers(N, 2)))


def case_sum_of_gradients_of_a_sum():
    make = lambda: dense(MSE(reduction="sum"), optimizer=keras.optimizers.SGD(0.002))  # noqa: E731
    check_horovod(make, (numbers(N, FEATURES), numbers(N, 2)), op=hvd.Sum)


class Vector(keras.layers.Layer):
    """Adds a loss of one number a row, as keras.io's end-point layers do: Keras adds them up."""

    def call(self, x):
        self.add_loss(0.02 * keras.ops.sum(keras.ops.square(x), axis=-1))
        return x


def with_vector_added() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(4, "tanh"), Vector(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=JIT)
    return model


def case_added_loss_that_is_a_vector():
    check(with_vector_added, numbers(N, FEATURES), numbers(N, 2))


def case_added_loss_that_is_a_vector_in_horovods_face():
    check_horovod(with_vector_added, (numbers(N, FEATURES), numbers(N, 2)))


def case_accumulation_of_a_sum():
    optimizer = lambda: keras.optimizers.SGD(0.004, gradient_accumulation_steps=3)  # noqa: E731
    check(lambda: dense(MSE(reduction="sum"), optimizer=optimizer()), numbers(N, FEATURES), numbers(N, 2))


def case_default_loss_exchanges_nothing_new():
    with strategy().scope():
        model = dense("mse")
    communicator = choros.global_process_set.communicator
    x, y = numbers(48, FEATURES), numbers(48, 2)
    fit(model, x, y)
    before = communicator.collectives
    fit(model, x, y, epochs=1)
    short = communicator.collectives - before
    before = communicator.collectives
    fit(model, x[:16], y[:16], epochs=1)
    assert short - (communicator.collectives - before) == 2  # one a step


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────


def mean_error(y_true, y_pred):
    """A plain function that returns one number for a batch, which Keras then weighs like any other batch."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # of Keras on JAX
def case_plain_function_and_confusion_matrices():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = [
            mean_error,
            keras.metrics.AUC(name="auc"),
            keras.metrics.BinaryIoU(name="iou"),
            keras.metrics.F1Score(threshold=0.5),
        ]
        model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=metrics, jit_compile=JIT)
        return model

    x = numbers(N, FEATURES)
    y = (x[:, :1] > 0).astype("float32")
    check(make, x, y, validation_data=(x[:21], y[:21]))


def total_error(y_true, y_pred):
    """A sum over the rows of a batch."""
    return keras.ops.sum(keras.ops.abs(y_true - y_pred))


def relative_error(y_true, y_pred):
    """A ratio of sums, as a Dice coefficient is one."""
    return total_error(y_true, y_pred) / keras.ops.sum(keras.ops.abs(y_true))


def case_metric_function_that_returns_a_sum():
    check(lambda: dense("mse", metrics=[total_error, mean_error]), numbers(N, FEATURES), numbers(N, 2))


def case_metric_function_that_returns_a_ratio_is_said():
    with strategy().scope():
        model = dense("mse", metrics=[relative_error])
    first = choros.rank() == 0
    with pytest.warns(UserWarning, match="a metric function") if first else contextlib.nullcontext():
        fit(model, numbers(N, FEATURES), numbers(N, 2))


def case_evaluation_shows_what_it_returns():
    """The progress bar and callbacks receive the metrics of all examples, as does the caller."""

    class Watch(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            self.logs = dict(logs)

    x, y = numbers(N, FEATURES), numbers(N, 2)
    with strategy().scope():
        ours = dense("mse", metrics=["mae"])
    theirs = dense("mse", metrics=["mae"])
    watch = Watch()
    returned = ours.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[watch], return_dict=True)
    assert watch.logs == returned
    assert_same_results(returned, theirs.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True))


def case_evaluation_in_horovods_face():
    """Each rank's own metrics; with the callback, those of all examples."""
    x, y = numbers(N, FEATURES), numbers(N, 2)
    loss = MSE(reduction="sum")
    model = dense(loss, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    expected = dense(loss).evaluate(x, y, batch_size=BATCH, verbose=0)
    part = hvd.shard((x, y), batch_size=BATCH)
    together = model.evaluate(part, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
    assert together == pytest.approx(expected, rel=1e-5)
    alone = model.evaluate(part, verbose=0)
    assert hvd.allgather_object(alone) != [alone] * hvd.size()
    assert model.evaluate(part, verbose=0) == alone


# ── training steps of one's own ──────────────────────────────────────────────────────────────────────


class OwnGradient(keras.Model):
    """A ``train_step`` of TensorFlow that differentiates a loss of one number a row, as keras.io's siamese network."""

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = 0.05 * tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.own_loss.update_state(loss)
        return {"own_loss": self.own_loss.result()}

    @functools.cached_property
    def own_loss(self):
        return keras.metrics.Mean(name="own_loss")

    @property
    def metrics(self):
        return [self.own_loss]


def of_a_vector(**compile_args: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((FEATURES,))
    model = OwnGradient(x, keras.layers.Dense(2)(keras.layers.Dense(8, activation="tanh")(x)))
    model.compile(keras.optimizers.SGD(0.05), jit_compile=JIT, **compile_args)
    return model


def case_gradient_of_a_vector():
    check(of_a_vector, numbers(N, FEATURES), numbers(N, 2), evaluate=False)
    check_horovod(of_a_vector, (numbers(N, FEATURES), numbers(N, 2)))


def case_gradient_of_a_vector_eagerly():
    check(lambda: of_a_vector(run_eagerly=True), numbers(N, FEATURES), numbers(N, 2), evaluate=False)


def total(y, predicted):
    return 0.05 * keras.ops.sum(keras.ops.square(y - predicted))


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return total(y, y_pred)


class OwnSum(OwnStep):
    """A ``train_step`` that differentiates a sum, of which its metric gets one number a batch."""

    def _eager_step(self, x, y, weight):
        del weight

        def loss_on():
            loss = total(y, self(x, training=True))
            self.own_loss.update_state(loss)
            return loss

        apply_gradients(loss_on, self, self.optimizer)
        return {"own_loss": self.own_loss.result()}


class Total(keras.layers.Layer):
    """Adds a loss that is a sum, as one number."""

    def call(self, x):
        self.add_loss(0.02 * keras.ops.sum(keras.ops.square(x)))
        return x


class Penalties(keras.layers.Layer):
    """Adds losses of vectors that have no rows, as many numbers as a rank may have rows, and a mean of each feature."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        self.add_loss(0.1 * keras.ops.abs(self.scale))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x * self.scale), axis=0))
        return x * self.scale


class Whole(keras.losses.Loss):
    """Computes one number of the batch, past Keras' reduction."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return total(y_true, y_pred)


def of_sums(kind: type[keras.Model] = keras.Model, loss: Any = None, added: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((FEATURES,))
    regularizer = None if loss is total or isinstance(loss, Whole) else "l2"
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer=regularizer)(x)
    model = kind(x, keras.layers.Dense(2)(Total()(hidden) if added else hidden))
    model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=JIT)
    return model


def case_loss_function_that_returns_a_sum():
    check(lambda: of_sums(loss=total), numbers(N, FEATURES), numbers(N, 2))


def case_loss_class_that_returns_a_sum_past_keras():
    check(lambda: of_sums(loss=Whole()), numbers(N, FEATURES), numbers(N, 2))


@pytest.mark.parametrize("loss", ["a mean", "a sum"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def case_loss_function_that_returns_a_number_with_sample_weights(loss, reduction):
    """Keras multiplies the number by each weight."""

    class Number(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return 0.1 * (mean_error if loss == "a mean" else total)(y_true, y_pred)

    rows = N + 1 if reduction == "mean_with_sample_weight" else N  # of one row, Keras does not divide by its weight
    sample_weight = np.random.default_rng(3).uniform(0.0, 2.0, rows).astype("float32")
    check(
        lambda: dense(Number(reduction=reduction), optimizer=keras.optimizers.SGD(0.002)),
        numbers(rows, FEATURES),
        numbers(rows, 2),
        sample_weight=sample_weight,
    )


def case_another_loss_in_another_compile():
    def trained(make: Callable[[], keras.Model]) -> tuple[list[np.ndarray], History]:
        model = make()
        history = {}
        for loss in (total, mean_error, total):
            with strategy().scope() if model.compiled and distribute.has_strategy() else contextlib.nullcontext():
                model.compile(keras.optimizers.SGD(0.02), loss, jit_compile=JIT)
            history = fit(model, numbers(N, FEATURES), numbers(N, 2), epochs=1)
        return weights(model), history

    expected, history = of_one_rank(lambda: trained(lambda: of_sums(loss=total)))
    with strategy().scope():
        ours = of_sums(loss=total)
    own, own_history = trained(lambda: ours)
    assert_same_results(own_history, history)
    assert_same_results(dict(enumerate(own)), dict(enumerate(expected)))


class TwoSums(keras.Model):
    """Differentiates a mean and a sum in the same line."""

    def train_step(self, data):
        x, y = data
        losses = (lambda: 0.1 * mean_error(y, self(x, training=True)), lambda: total(y, self(x, training=True)))
        results = [apply_gradients(loss_on, self, self.optimizer) for loss_on in losses]
        return {"finite": keras.ops.cast(keras.ops.isfinite(sum(results)), "float32")}


def case_a_mean_and_a_sum_in_one_line():
    check(lambda: of_sums(TwoSums, loss=total), numbers(N, FEATURES), numbers(N, 2), evaluate=False)


def jax_step(gradients_of: Callable[..., Any]) -> Make:
    """A model with a ``train_step`` of JAX that applies the gradients that a function of weights, x and y returns."""

    class Step(keras.Model):
        def train_step(self, state, data):
            trainable, others, moments, metrics = state

            def predict(weights, x):
                return self.stateless_call(weights, others, x, training=True)[0]

            gradients = gradients_of(predict, trainable, *data)
            trainable, moments = self.optimizer.stateless_apply(moments, gradients, trainable)
            return {"done": keras.ops.ones(())}, (trainable, others, moments, metrics)

    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        x = keras.Input((FEATURES,))
        model = Step(x, keras.layers.Dense(2)(keras.layers.Dense(6, "tanh")(x)))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    return make


def total_of(weights, predict, x, y):
    return total(y, predict(weights, x))


def case_gradients_of_a_sum_in_jaxs_ways():
    import jax
    from jax import grad, value_and_grad  # past what choros replaces while a step is compiled

    made_before = jax.value_and_grad(total_of)

    def by_vjp(predict, weights, x, y):
        loss, pull = jax.vjp(lambda weights: total_of(weights, predict, x, y), weights)
        return pull(keras.ops.ones_like(loss))[0]

    def in_parts(predict, weights, x, y):
        def add(gradients, part):
            return jax.tree.map(jax.numpy.add, gradients, grad(total_of)(weights, predict, *part)), None

        parts = [each.reshape(2, -1, each.shape[-1]) for each in (x, y)]
        return jax.lax.scan(add, jax.tree.map(jax.numpy.zeros_like, weights), parts)[0]

    def by_its_own_rule(predict, weights, x, y):
        loss = jax.custom_vjp(lambda weights: total_of(weights, predict, x, y))
        loss.defvjp(lambda weights: made_before(weights, predict, x, y), lambda own, g: ([g * each for each in own],))
        return jax.grad(loss)(weights)

    for way in (
        by_its_own_rule,
        lambda predict, weights, x, y: grad(total_of)(weights, predict, x, y),
        lambda predict, weights, x, y: value_and_grad(total_of)(weights, predict, x, y)[1],
        lambda predict, weights, x, y: made_before(weights, predict, x, y)[1],
        by_vjp,
    ):
        check(jax_step(way), numbers(N, FEATURES), numbers(N, 2), evaluate=False, epochs=1)
    check(jax_step(in_parts), numbers(48, FEATURES), numbers(48, 2), evaluate=False, epochs=1)


def case_gradients_of_which_no_loss_is_seen_are_said():
    import jax

    def of_predictions(predict, weights, x, y):
        predicted, pull = jax.vjp(lambda weights: predict(weights, x), weights)
        return pull((predicted - y) / len(x))[0]

    make = jax_step(of_predictions)
    with strategy().scope():
        model = make()
    first = choros.rank() == 0
    with pytest.warns(UserWarning, match="has not seen") if first else contextlib.nullcontext() as found:
        fit(model, numbers(48, FEATURES), numbers(48, 2))
    if found is not None:
        assert len([each for each in found if "has not seen" in str(each.message)]) == 1


def case_gradients_of_each_example_with_as_many_numbers_as_rows():
    import jax

    def of_each(predict, weights, x, y):
        def gradient(x, y):
            return jax.grad(total_of)(weights, lambda weights, x: predict(weights, x[None])[0], x, y)

        return [each.mean(0) for each in jax.vmap(gradient)(x, y)]

    check(jax_step(of_each), numbers(12, FEATURES), numbers(12, 2), evaluate=False, epochs=1, batch_size=4)


def case_constants_with_as_many_numbers_as_one_rank_or_all_have_rows():
    class Weighted(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.einsum("ij,j->", keras.ops.square(y - y_pred), keras.ops.convert_to_tensor([0.1, 0.2]))

    for rows in (4, 5):
        check(lambda: of_sums(Weighted), numbers(4 * rows, FEATURES), numbers(4 * rows, 2), epochs=1, batch_size=rows)


def case_a_step_that_has_one_number_of_rows():
    """It cannot be read with another one."""
    import jax

    def of_these(predict, weights, x, y):
        if len(x) not in (BATCH, BATCH // hvd.size()):
            raise ValueError(len(x))
        return jax.grad(total_of)(weights, predict, x, y)

    check(jax_step(of_these), numbers(48, FEATURES), numbers(48, 2), evaluate=False, epochs=1)


def case_a_loss_in_jaxs_checkpoint():
    import jax

    def checkpointed(reduction):
        def gradients(predict, weights, x, y):
            return jax.grad(jax.checkpoint(lambda weights: MSE(reduction=reduction)(y, predict(weights, x))))(weights)

        return jax_step(gradients)

    x, y = numbers(48, FEATURES), numbers(48, 2)
    with replaced(data_rows, _differ=False):  # after batches of two sizes, means' divisors are exchanged
        check(checkpointed("mean"), x, y, evaluate=False, epochs=1)
    with strategy().scope():
        model = checkpointed("sum")()
    with pytest.raises(ConfigError, match=r"jax\.checkpoint cannot contain"):
        fit(model, x, y)


def case_compute_loss_that_is_a_sum():
    check(lambda: of_sums(OwnLoss), numbers(N, FEATURES), numbers(N, 2))
    check_horovod(lambda: of_sums(OwnLoss), (numbers(N, FEATURES), numbers(N, 2)))


def case_gradient_of_a_sum():
    check(lambda: of_sums(OwnSum, loss=total), numbers(N, FEATURES), numbers(N, 2), evaluate=False)


def case_added_loss_that_is_a_sum():
    check(lambda: of_sums(loss="mse", added=True), numbers(N, FEATURES), numbers(N, 2))
    data = Twice(numbers(N, FEATURES), numbers(N, 2))  # TensorFlow does not know whether a replica has rows
    check(lambda: of_sums(loss="mse", added=True), data, batch_size=None)


def case_added_loss_that_is_a_sum_beside_a_compute_loss_of_the_users():
    class Passing(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, sample_weight)

    check(lambda: of_sums(Passing, loss="mse", added=True), numbers(N, FEATURES), numbers(N, 2))


def case_added_losses_of_vectors_without_rows():
    def make() -> keras.Model:
        keras.utils.set_random_seed(1)
        x = keras.Input((FEATURES,))
        model = keras.Model(x, keras.layers.Dense(2)(Penalties()(keras.layers.Dense(BATCH // hvd.size())(x))))
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=JIT)
        return model

    check(make, numbers(N, FEATURES), numbers(N, 2))


@pytest.mark.parametrize("smooth", [None, 0.0, 1.0])
def case_a_ratio_of_sums_is_said(smooth):
    """Each rank has the ratio of its rows, also beside a loss of each row; the warning has the user's file."""

    def ratio(y, predicted):
        counts = keras.ops.cast(y > 0, "float32")
        added = 0.0 if smooth is None else smooth
        part = (keras.ops.sum(keras.ops.square(y - predicted) * counts) + added) / (keras.ops.sum(counts) + added)
        return part if smooth is None else part + keras.losses.mean_squared_error(y, predicted)

    with strategy().scope():
        model = of_sums(loss="mse")
    fit(model, numbers(N, FEATURES), numbers(N, 2), epochs=1)
    with strategy().scope():
        model.compile(keras.optimizers.SGD(0.05), ratio, jit_compile=JIT)  # as one that is compiled for the first time
    with (
        pytest.warns(UserWarning, match="rows of the batch")
        if choros.rank() == 0
        else contextlib.nullcontext() as found
    ):
        fit(model, numbers(N, FEATURES), numbers(N, 2))
    if found is not None:
        said = [each for each in found if "rows of the batch" in str(each.message)]
        assert [Path(each.filename).name for each in said] == ["loss_cases.py"]


class TwoParts(keras.Model):
    """Learns from unlabelled rows, and from fewer labelled ones, as keras.io's SimCLR, AdaMatch and FixMatch do."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.encoder = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(6, activation="tanh")])
        self.probe = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.loss_of_rows = MSE(reduction=reduction)
        self.built = True

    def call(self, x):
        return self.encoder(x)

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        labelled, labels = y
        unlabelled = self.loss_of_rows(keras.ops.zeros_like(y_pred), y_pred)
        return 0.3 * unlabelled + MSE()(labels, self.probe(self.encoder(labelled)))

    def compute_metrics(self, x, y, y_pred, sample_weight):
        return self.get_metrics_result()


def two_parts(reduction: str = "sum_over_batch_size") -> TwoParts:
    model = TwoParts(reduction)
    model.compile(keras.optimizers.SGD(0.05), jit_compile=JIT)
    return model


class Pairs(keras.utils.PyDataset):
    """Batches of 13 unlabelled rows and 5 labelled ones; the last has 4 and 1."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        few, many = slice(5 * index, min(5 * index + 5, 11)), slice(13 * index, min(13 * index + 13, 30))
        return numbers(30, FEATURES)[many], (numbers(11, FEATURES, seed=1)[few], numbers(11, 1, seed=2)[few])


def zipped() -> Any:
    import tensorflow as tf

    labelled = tf.data.Dataset.from_tensor_slices((numbers(11, FEATURES, seed=1), numbers(11, 1, seed=2))).batch(5)
    return tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(numbers(30, FEATURES)).batch(13), labelled))


def case_parts_with_different_numbers_of_rows():
    check(two_parts, Pairs(), batch_size=None, evaluate=False)
    check_horovod(two_parts, Pairs(), batch_size=None)


def case_parts_of_which_one_is_summed():
    check(lambda: two_parts("sum"), Pairs(), batch_size=None, evaluate=False)


def case_zipped_data_sets():
    for batches in (zipped(), zipped().map(lambda *parts: parts).repeat(2)):
        check(two_parts, batches, batch_size=None, evaluate=False)
    check_horovod(two_parts, zipped(), batch_size=13)


class Adversaries(keras.Model):
    """keras.io's DCGAN, small: two networks with an optimizer each, and metrics that get one number a batch."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        layers = keras.layers
        self.discriminator = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        # Both networks' gradients have the same shapes.
        self.generator = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh"), layers.Dense(FEATURES)])
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile(jit_compile=JIT)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def _d_loss(self, real):
        made = self.generator(real[:, ::-1] if BACKEND == "tensorflow" else keras.ops.flip(real, axis=1))
        labels = keras.ops.concatenate([keras.ops.ones_like(real[:, :1]), keras.ops.zeros_like(real[:, :1])])
        return self.loss_fn(labels, self.discriminator(keras.ops.concatenate([made, real])))

    def _g_loss(self, real):
        return self.loss_fn(keras.ops.zeros_like(real[:, :1]), self.discriminator(self.generator(real)))

    def train_step(self, data):
        real = keras.utils.unpack_x_y_sample_weight(data)[0]
        for loss_on, network, optimizer, metric in (
            (self._d_loss, self.discriminator, self.d_optimizer, self.d_loss),
            (self._g_loss, self.generator, self.g_optimizer, self.g_loss),
        ):
            metric.update_state(apply_gradients(lambda: loss_on(real), network, optimizer))  # noqa: B023
        return {metric.name: metric.result() for metric in self.metrics}


def adversaries(wrap: Callable[[Any], Any] = lambda optimizer: optimizer, reduction: str = "mean") -> Adversaries:
    model = Adversaries()
    loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction)
    scale = 1.0 if reduction == "mean" else 0.05
    model.compile(wrap(keras.optimizers.Adam(0.01 * scale)), wrap(keras.optimizers.SGD(0.1 * scale)), loss)
    return model


class Clipped(keras.optimizers.SGD):
    """Clips the gradients of the whole batch, on TensorFlow: other trainers of Keras call ``apply``."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(keras.ops.clip(each, -0.05, 0.05), v) for each, v in grads_and_vars])


def case_an_optimizer_that_changes_gradients():
    check(lambda: dense("mse", optimizer=Clipped(0.1)), numbers(N, FEATURES), numbers(N, 2))


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def case_frozen_weights():
    def make() -> keras.Model:
        model = dense("mse")
        model.trainable = False
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=JIT)
        return model

    check(make, numbers(N, FEATURES), numbers(N, 2))


def case_two_optimizers():
    check(adversaries, numbers(N, FEATURES), evaluate=False)


def case_two_optimizers_that_were_created_outside_of_the_scope():
    with strategy().scope():
        ours = Adversaries()
    loss, theirs, x = keras.losses.BinaryCrossentropy(from_logits=True), adversaries(), numbers(N, FEATURES)
    ours.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1), loss)
    expected, history = of_one_rank(lambda: (fit(theirs, x), weights(theirs))[::-1])
    own_history = fit(ours, x)
    assert_same(ours, expected, (own_history, history))


def case_two_optimizers_and_a_sum():
    check(lambda: adversaries(reduction="sum"), numbers(N, FEATURES), evaluate=False)


def case_two_optimizers_in_horovods_face():
    ours, theirs = adversaries(hvd.DistributedOptimizer), adversaries()
    x = numbers(N, FEATURES)
    history = fit(theirs, x)
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    own_history = fit(ours, hvd.shard((x,), batch_size=BATCH), batch_size=None, callbacks=start)
    assert_same(ours, weights(theirs), (own_history, history))


def case_optimizers_of_different_process_sets_are_an_error():
    alone = hvd.add_process_set([0])
    try:
        sets = iter((hvd.global_process_set, alone))
        model = adversaries(lambda optimizer: hvd.DistributedOptimizer(optimizer, process_set=next(sets)))
        with pytest.raises(ValueError, match="the same process set"):
            fit(model, numbers(4, FEATURES), callbacks=[hvd.callbacks.MetricAverageCallback()])
    finally:
        assert hvd.remove_process_set(alone)


class Extremes(keras.metrics.Metric):
    """The largest and the smallest error, and the number of rows; a user's own metric, which declares nothing."""

    def __init__(self, name="extremes"):
        super().__init__(name=name)
        self.largest = self.add_weight(name="largest", initializer="zeros")
        self.smallest = self.add_weight(name="smallest", initializer="zeros")
        self.rows = keras.Variable(0.0, trainable=False, name="rows")  # which, unlike add_weight, declares no sum

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.cast(y_true, "float32") - y_pred
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(errors)))
        self.smallest.assign(keras.ops.minimum(self.smallest, keras.ops.min(errors)))
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(errors)[0], "float32"))

    def result(self):
        return {"largest": self.largest.value, "smallest": self.smallest.value, "rows": self.rows.value}


class MeanOfBatches(keras.metrics.Metric):
    """The mean of the batches' means, as a user may write it."""

    def __init__(self):
        super().__init__(name="mean_of_batches")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.mean(keras.ops.abs(keras.ops.cast(y_true, "float32") - y_pred)))
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / self.batches


def case_metric_whose_weights_are_those_of_batches_is_warned_of():
    model = dense("mse", metrics=[MeanOfBatches()])
    model.optimizer = hvd.DistributedOptimizer(model.optimizer)
    data = hvd.shard((numbers(N, FEATURES), numbers(N, 2)), batch_size=BATCH)
    with pytest.warns(UserWarning, match="'mean_of_batches' gives each batch a weight of its own"):
        model.fit(data, shuffle=False, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])


def case_metric_that_keeps_a_maximum_and_a_minimum():
    check(lambda: dense("mse", metrics=[Extremes()]), numbers(N, FEATURES), numbers(N, 2))
