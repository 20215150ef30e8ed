"""The cells of the transparency matrix: each trains under a strategy, and in plain Keras on the whole data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

import choros
from choros import distribute, nn
from choros.parallel.objects import allgather_object
from training.matrix import BOUND, CELLS, Cell, Difference, covering

BACKEND = keras.backend.backend()
JIT = False if BACKEND == "tensorflow" else "auto"
FEATURES, STEPS, BATCH, EPOCHS = 5, 4, 12, 2
ROWS = {"even": 36, "uneven": 33, "one row": 25}
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
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_on()
        weights = model.trainable_weights  # the loss may have created them
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss
    import torch

    model.zero_grad()
    loss = loss_on()
    loss.backward()
    weights = model.trainable_weights
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)
    return loss.detach()


class Frozen(keras.layers.Dense):
    """A layer that is not trained."""

    def __init__(self, units):
        super().__init__(units, activation="tanh", trainable=False)


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
    if cell.loss == "LoRA":
        hidden = Frozen(6)(Frozen(6)(Frozen(6)(Frozen(6)(x))))
        return kind(x, layers.Dense(2, lora_rank=2)(hidden))
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


@dataclass(frozen=True)
class Trained:
    """What training ends with: the weights, and losses and metrics of epochs or steps."""

    weights: list[np.ndarray]
    history: np.ndarray


class Training:
    """Trains a model, which starts from the same values each time: under a strategy, or in plain Keras without one."""

    def __init__(self, cell: Cell, here: distribute.Strategy | None) -> None:
        self.cell, self.here = cell, here
        with contextlib.nullcontext() if here is None else here.scope():
            self.model, self.optimizer = model_of(cell), optimizer_of(cell)
            if cell.way != "loop":
                # Plain Keras need not compile a step, except on TensorFlow, where that changes the losses of outputs.
                # On JAX, a step that accumulates takes longer if it is not compiled as a whole.
                eagerly = here is None and BACKEND != "tensorflow" and cell.micro_batches == 1
                self.model.compile(self.optimizer, **losses_of(cell), jit_compile=JIT, run_eagerly=eagerly)
            self.optimizer.build(self.model.trainable_variables)
        self.variables = [*self.model.variables, *self.optimizer.variables]
        self.start = [keras.ops.convert_to_numpy(variable.value) for variable in self.variables]
        self.step = self._step if here is None else self._step_of_replicas
        if BACKEND == "tensorflow" and here is not None:
            import tensorflow as tf

            self.step = tf.function(self.step, reduce_retracing=True)

    def __call__(self, x: Any, y: Any, weight: Any) -> Trained:
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        history = self._loop(x, y) if self.cell.way == "loop" else self._fit(x, y, weight)
        return Trained([keras.ops.convert_to_numpy(weight.value) for weight in self.model.weights], np.array(history))

    def _fit(self, x: Any, y: Any, weight: Any) -> list[float]:
        fitted = self.model.fit(x, y, BATCH, EPOCHS, sample_weight=weight, shuffle=False, verbose=0)
        return [value for name in sorted(fitted.history) for value in fitted.history[name]]

    def _loop(self, x: Any, y: Any) -> list[float]:
        batches: Any = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
        if BACKEND == "tensorflow":
            import tensorflow as tf

            batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        if self.here is not None:
            batches = self.here.experimental_distribute_dataset(batches)
        return [float(self.step(batch)) for _ in range(EPOCHS) for batch in batches]

    def _step_of_replicas(self, batch: Any) -> Any:
        assert self.here is not None
        return self.here.reduce("SUM", self.here.run(self._step, args=(batch,)), axis=None)

    def _step(self, batch: Any) -> Any:
        x, y = map(keras.ops.convert_to_tensor, batch)
        if BACKEND == "jax":
            return self._jax_step(x, y)
        return apply_gradients(lambda: self._loss(y, self.model(x, training=True)), self.model, self.optimizer)

    def _jax_step(self, x: Any, y: Any) -> Any:
        import jax

        def compute(trainable):
            predicted, _ = self.model.stateless_call(trainable, frozen, x, training=True)
            return self._loss(y, predicted)

        frozen = [variable.value for variable in self.model.non_trainable_variables]
        weights = self.model.trainable_variables
        loss, gradients = jax.value_and_grad(compute)([weight.value for weight in weights])
        self.optimizer.apply(gradients, weights)
        return loss

    def _loss(self, y: Any, predicted: Any) -> Any:
        losses = keras.ops.mean(keras.ops.square(y - predicted), axis=-1)
        if self.cell.loss == "sum":
            return keras.ops.sum(losses)
        return keras.ops.mean(losses) if self.here is None else nn.compute_average_loss(losses)


@functools.lru_cache(maxsize=1)
def training_of(cell: Cell, here: distribute.Strategy | None) -> Training:
    return Training(cell, here)


def trained(cell: Cell, here: distribute.Strategy | None) -> Trained:
    """Trains with a model that the cells before it have used if they differ in their data only: it is compiled once."""
    return training_of(replace(cell, last_batch="even"), here)(*data_of(cell))


def compare(cells: Sequence[Cell]) -> dict[Cell, Difference]:
    """Trains each cell on all ranks, and in plain Keras on one of them; returns the largest difference of any rank."""
    ours = {cell: trained(cell, strategy()) for cell in cells}
    share = {
        cell: trained(cell, None)
        for cell in cells[slice(*choros.shard_range(len(cells), choros.rank(), choros.size()))]
    }
    plain = {cell: result for part in allgather_object(share) for cell, result in part.items()}
    everyone = allgather_object({cell: difference(ours[cell], plain[cell]) for cell in cells})
    training_of.cache_clear()
    keras.utils.clear_session()
    return {cell: Difference(*map(max, zip(*(each[cell] for each in everyone), strict=True))) for cell in cells}


def difference(ours: Trained, plain: Trained) -> Difference:
    weights = max(_relative(*pair) for pair in zip(ours.weights, plain.weights, strict=True))
    return Difference(weights, _relative(ours.history, plain.history))


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    found = float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6))
    return found if found >= 0 else float("inf")  # max() would hide NaN


def check(way: str) -> None:
    """Checks the cells of the selection that train in this way, with this framework."""
    cells = covering(tuple(cell for cell in CELLS if cell.framework == BACKEND))
    found = compare([cell for cell in cells if cell.way == way])
    assert {str(cell): each for cell, each in found.items() if max(each) > BOUND} == {}
    assert found
    assert choros.size() > 1


def case_fit():
    check("fit")


def case_train_step():
    check("train_step")


def case_loop():
    check("loop")
