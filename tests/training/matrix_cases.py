"""The cells of the transparency matrix: each trains under a strategy, and in plain Keras on the whole data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import choros
from choros import distribute, nn
from training.matrix import CELLS, Cell, covering

BACKEND = keras.backend.backend()
JIT = False if BACKEND == "tensorflow" else "auto"
FEATURES, STEPS, BATCH, EPOCHS = 5, 4, 12, 2
ROWS = {"even": 36, "uneven": 33, "one row": 25}
BOUND = 1e-4
MSE = keras.losses.MeanSquaredError


@functools.cache
def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


class OwnStep(keras.Model):
    """A functional model with a ``train_step`` of its own, which keeps a metric of its loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own_loss = keras.metrics.Mean(name="own_loss")

    def train_step(self, *args):
        data = keras.utils.unpack_x_y_sample_weight(args[-1])
        return self._jax_step(args[0], *data) if BACKEND == "jax" else self._eager_step(*data)

    def _eager_step(self, x, y, weight):
        def loss_on():
            return self.compute_loss(x, y, self(x, training=True), weight)

        self.own_loss.update_state(apply_gradients(loss_on, self, self.optimizer))
        return {"own_loss": self.own_loss.result()}

    def _jax_step(self, state, x, y, weight):
        import jax

        trainable, others, moments, metrics = state
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, _, others, metrics)), gradients = gradient(
            trainable, others, metrics, x, y, weight, training=True, optimizer_variables=moments
        )
        trainable, moments = self.optimizer.stateless_apply(moments, gradients, trainable)
        updated, logs = [], {}
        for metric in self.metrics:
            values = metrics[len(updated) : len(updated) + len(metric.variables)]
            if metric is self.own_loss:
                values = metric.stateless_update_state(values, loss)
                logs["own_loss"] = metric.stateless_result(values)
            updated += values
        return logs, (trainable, others, moments, updated)


def apply_gradients(loss_on: Callable[[], Any], model: keras.Model, optimizer: Any) -> Any:
    """Makes one update on TensorFlow or PyTorch; returns the loss."""
    weights = model.trainable_weights
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_on()
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss
    import torch

    model.zero_grad()
    loss = loss_on()
    loss.backward()
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)
    return loss.detach()


class Added(keras.layers.Layer):
    """Adds a loss that is a mean over the examples."""

    def call(self, x):
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
        return x


def model_of(cell: Cell) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    kind = OwnStep if cell.way == "train_step" else keras.Model
    if cell.loss == "masked":
        x = keras.Input((STEPS,), dtype="int32")
        return kind(x, layers.Dense(1)(layers.Embedding(7, FEATURES, mask_zero=True)(x)))
    x = keras.Input((FEATURES,))
    hidden = layers.Dense(6, activation="tanh", kernel_regularizer="l2" if cell.loss == "added" else None)(x)
    if cell.loss == "two outputs":
        return kind(x, {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)})
    return kind(x, layers.Dense(2)(Added()(hidden) if cell.loss == "added" else hidden))


def optimizer_of(cell: Cell) -> keras.optimizers.Optimizer:
    steps = {} if cell.micro_batches == 1 else {"gradient_accumulation_steps": cell.micro_batches}
    rate = 0.1 if cell.loss != "sum" else 0.005
    optimizers = keras.optimizers
    return {
        "SGD": lambda: optimizers.SGD(rate, **steps),
        "momentum, clipnorm": lambda: optimizers.SGD(rate, momentum=0.9, clipnorm=0.5, **steps),
        "Adam, global_clipnorm": lambda: optimizers.Adam(rate / 10, global_clipnorm=0.5, **steps),
        "AdamW, EMA": lambda: optimizers.AdamW(rate / 10, use_ema=True, ema_overwrite_frequency=2, **steps),
    }[cell.optimizer]()


def losses_of(cell: Cell) -> dict[str, Any]:
    if cell.loss == "two outputs":
        losses = {"a": MSE(reduction="sum"), "b": keras.losses.MeanAbsoluteError()}
        return {"loss": losses, "loss_weights": {"a": 0.05, "b": 1.5}}
    reduction = {"sum": "sum", "weighted mean": "mean_with_sample_weight"}.get(cell.loss, "sum_over_batch_size")
    return {"loss": MSE(reduction=reduction)}


def data_of(cell: Cell) -> tuple[Any, Any, Any]:
    n, generator = ROWS[cell.last_batch], np.random.default_rng(0)
    x, y = generator.normal(size=(n, FEATURES)).astype("float32"), generator.normal(size=(n, 2)).astype("float32")
    weight = np.linspace(0.1, 3.0, n).astype("float32") if cell.loss == "weighted mean" else None
    if cell.loss == "masked":
        x = np.where(np.arange(STEPS) < generator.integers(1, STEPS + 1, (n, 1)), 1 + np.arange(n)[:, None] % 6, 0)
        return x.astype("int32"), generator.normal(size=(n, STEPS, 1)).astype("float32"), None
    return x, {"a": y[:, :1], "b": y[:, 1:]} if cell.loss == "two outputs" else y, weight


# ── training ─────────────────────────────────────────────────────────────────────────────────────────


def trained_by_fit(cell: Cell, scope: Any) -> tuple[keras.Model, list[float]]:
    with scope:
        model = model_of(cell)
        model.compile(optimizer_of(cell), **losses_of(cell), jit_compile=JIT)
    x, y, weight = data_of(cell)
    history = model.fit(x, y, BATCH, EPOCHS, sample_weight=weight, shuffle=False, verbose=0).history
    return model, [value for name in sorted(history) for value in history[name]]


def trained_by_loop(cell: Cell, scope: Any, here: distribute.Strategy) -> tuple[keras.Model, list[float]]:
    with scope:
        model, optimizer = model_of(cell), optimizer_of(cell)
        optimizer.build(model.trainable_variables)
    x, y, _ = data_of(cell)
    batches: Any = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def loss_on(y, predicted):
        losses = keras.ops.mean(keras.ops.square(y - predicted), axis=-1)
        return keras.ops.sum(losses) if cell.loss == "sum" else nn.compute_average_loss(losses)

    def step(batch):
        x, y = map(keras.ops.convert_to_tensor, batch)
        if BACKEND == "jax":
            return jax_step(x, y)
        return apply_gradients(lambda: loss_on(y, model(x, training=True)), model, optimizer)

    def jax_step(x, y):
        import jax

        def compute(trainable):
            predicted, _ = model.stateless_call(trainable, [], x, training=True)
            return loss_on(y, predicted)

        loss, gradients = jax.value_and_grad(compute)([v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def whole_step(batch):
        return here.reduce("SUM", here.run(step, args=(batch,)), axis=None)

    if BACKEND == "tensorflow":
        whole_step = tf.function(whole_step, reduce_retracing=True)
    distributed = here.experimental_distribute_dataset(batches)
    return model, [float(whole_step(batch)) for _ in range(EPOCHS) for batch in distributed]


def differences(cell: Cell) -> tuple[float, float]:
    """Returns the largest relative differences of weights and of history to one process."""
    results = []
    for here in (strategy(), None):
        scope = contextlib.nullcontext() if here is None else here.scope()
        if cell.way == "loop":
            results.append(trained_by_loop(cell, scope, here or distribute.get_strategy()))
        else:
            results.append(trained_by_fit(cell, scope))
    (ours, history), (theirs, expected) = results
    pairs = [
        [keras.ops.convert_to_numpy(w.value) for w in pair] for pair in zip(ours.weights, theirs.weights, strict=True)
    ]
    return max(_relative(*pair) for pair in pairs), _relative(np.array(history), np.array(expected))


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6))


def check_part(part: int) -> None:
    """Checks every fourth cell of the selection that is of this framework."""
    wrong = {}
    for cell in [cell for cell in covering(CELLS) if cell.framework == BACKEND][part::4]:
        found = differences(cell)
        if not max(found) <= BOUND:
            wrong[str(cell)] = found
        keras.utils.clear_session()
    assert not wrong
    assert choros.size() > 1


def case_first_part():
    check_part(0)


def case_second_part():
    check_part(1)


def case_third_part():
    check_part(2)


def case_fourth_part():
    check_part(3)
