"""Models with a ``train_step`` of their own, and none or another ``call``: what is built before, and what a step gets;
and models whose variables become their gradients.

Run by ``test_steps.py`` on two ranks of each framework. The last of three batches has one row: one rank gets none.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np

import choros
import choros.keras as hvd
from choros import distribute
from choros.parallel.objects import broadcast_object
from ranks.reference import of_one_rank
from training.matrix_cases import apply_gradients

BACKEND = keras.backend.backend()
JIT = False if BACKEND == "tensorflow" else "auto"
FEATURES, CODES, BATCH, N = 5, 2, 12, 25
ROADS = ("strategy", "horovod")


@functools.cache
def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


def rows(n: int = N, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, FEATURES)).astype("float32")


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(weight.value)) for weight in model.weights]


def layers(*units: int, width: int | None) -> keras.Sequential:
    """A network; it infers its input's width if that is not given."""
    given = [] if width is None else [keras.Input((width,))]
    return keras.Sequential([*given, *(keras.layers.Dense(each, activation="tanh") for each in units)])


class Autoencoder(keras.Model):
    """As the VAE of keras.io: two networks, no ``call``; the metric of its loss is its own."""

    def __init__(self, *, known: bool = True) -> None:
        super().__init__()
        self.encoder = layers(4, CODES, width=FEATURES if known else None)
        self.decoder = layers(4, FEATURES, width=CODES if known else None)
        self.own_loss = keras.metrics.Mean(name="own_loss")
        self.built = BACKEND != "tensorflow"  # elsewhere plain Keras would call the model, to build it

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.own_loss]

    def train_step(self, *args: Any) -> Any:
        x = keras.tree.flatten(args[-1])[0]
        if BACKEND == "jax":
            return self._jax_step(args[0], x)
        self.own_loss.update_state(apply_gradients(lambda: self._loss(x), self, self.optimizer))
        return {"own_loss": self.own_loss.result()}

    def _loss(self, x: Any) -> Any:
        return keras.losses.MeanSquaredError()(x, self.decoder(self.encoder(x)))

    def _jax_step(self, state: Any, x: Any) -> Any:
        import jax

        trainable, others, moments, metrics = state

        def loss_on(values: Any) -> Any:
            with keras.StatelessScope(state_mapping=list(zip(self.trainable_variables, values, strict=True))):
                return self._loss(x)

        loss, gradients = jax.value_and_grad(loss_on)(trainable)
        trainable, moments = self.optimizer.stateless_apply(moments, gradients, trainable)
        metrics = self.own_loss.stateless_update_state(metrics, loss)
        return {"own_loss": self.own_loss.stateless_result(metrics)}, (trainable, others, moments, metrics)


class Gan(keras.Model):
    """Two networks, two optimizers, no ``call``; noise is made of the rows, so that it is the same on all ranks."""

    def __init__(self, road: str = "plain", **_: Any) -> None:
        super().__init__()
        self.generator = layers(4, FEATURES, width=CODES)
        self.critic = layers(4, 1, width=FEATURES)
        made = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05)]
        self.critics, self.generators = map(hvd.DistributedOptimizer, made) if road == "horovod" else made
        self.built = BACKEND != "tensorflow"

    def compile(self, **kwargs: Any) -> None:
        super().compile(**{**kwargs, "optimizer": None})

    def train_step(self, real: Any) -> dict[str, Any]:
        real = keras.tree.flatten(real)[0]
        noise = real[:, :CODES] * 2.0

        def critics_loss() -> Any:
            return keras.ops.mean(self.critic(self.generator(noise)) - self.critic(real))

        def generators_loss() -> Any:
            return -keras.ops.mean(self.critic(self.generator(noise)))

        first = apply_gradients(critics_loss, self.critic, self.critics)
        return {"critic": first, "generator": apply_gradients(generators_loss, self.generator, self.generators)}


def made(kind: Any, road: str = "plain", **kwargs: Any) -> keras.Model:
    model = kind(road=road, **kwargs) if kind is Gan else kind(**kwargs)
    optimizer: Any = keras.optimizers.Adam(0.01)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer) if road == "horovod" else optimizer, jit_compile=JIT)
    return model


def fit(model: keras.Model, road: str, data: Any, **kwargs: Any) -> dict[str, list[float]]:
    fixed = {"epochs": 2, "shuffle": False, "verbose": 0, **kwargs}
    if road == "horovod":
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        return model.fit(hvd.shard(data, batch_size=BATCH), callbacks=callbacks, **fixed).history
    return model.fit(*(data if isinstance(data, tuple) else (data,)), batch_size=BATCH, **fixed).history


def check(kind: Any) -> None:
    """Trains on all ranks, on either road, and in plain Keras on one."""

    def alone() -> tuple[list[np.ndarray], dict[str, list[float]]]:
        keras.utils.set_random_seed(1)
        model = made(kind)
        history = fit(model, "plain", rows())
        return weights(model), history

    expected, history = of_one_rank(alone)
    for road in ROADS:
        keras.utils.set_random_seed(1 + choros.rank())  # the ranks start from the weights of rank 0
        with strategy().scope() if road == "strategy" else keras.name_scope("own"):
            model = made(kind, road)
        own = fit(model, road, rows())
        for mine, other in zip(weights(model), expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=road)
            np.testing.assert_array_equal(mine, broadcast_object(mine), err_msg=road)
        if kind is not Gan:  # which returns those of the last batch
            np.testing.assert_allclose(own["own_loss"], history["own_loss"], rtol=1e-4, err_msg=road)


def case_no_call():
    check(Autoencoder)


def case_two_optimizers_and_no_call():
    check(Gan)


def case_a_trained_model_that_is_a_layer():
    """Its optimizer, which is idle then, and that of the whole model have gradients of the same shapes."""

    def trained(road: str) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        with strategy().scope() if road == "strategy" else keras.name_scope("own"):
            part = layers(4, FEATURES, width=FEATURES)
            for model in (part, keras.Sequential([keras.Input((FEATURES,)), part])):
                optimizer: Any = keras.optimizers.Adam(0.01)
                optimizer = hvd.DistributedOptimizer(optimizer) if road == "horovod" else optimizer
                model.compile(optimizer, "mse", jit_compile=JIT)
                fit(model, road, (rows(), rows(seed=1)))
        return weights(model)

    expected = of_one_rank(lambda: trained("plain"))
    for road in ROADS:
        for mine, other in zip(trained(road), expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=road)


def case_no_call_and_unknown_shapes():
    """The first batch builds it: in its first step, in plain Keras; before it, under a strategy."""
    keras.utils.set_random_seed(choros.rank())
    with strategy().scope():
        model = Autoencoder(known=False)
        model.compile(keras.optimizers.SGD(0.05), jit_compile=JIT)
    start: list[np.ndarray] = []
    note = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: start.append(weights(model)))
    fit(model, "strategy", rows(), callbacks=[note])
    assert_trained_as_one(model, start[0])


def case_no_call_and_unknown_shapes_eagerly():
    """Nothing is known before the first step: replicas are the same if they draw the same initial values."""
    keras.utils.set_random_seed(3)
    with strategy().scope():
        model = Autoencoder(known=False)
        model.compile(keras.optimizers.SGD(0.05), run_eagerly=True)
    fit(model, "strategy", rows())
    for mine in weights(model):
        np.testing.assert_array_equal(mine, broadcast_object(mine))


def assert_trained_as_one(model: keras.Model, start: list[np.ndarray]) -> None:
    plain = Autoencoder()
    plain.compile(keras.optimizers.SGD(0.05), jit_compile=JIT)
    for weight, value in zip(plain.weights, start, strict=True):
        weight.assign(value)
    fit(plain, "plain", rows())
    for mine, expected in zip(weights(model), weights(plain), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(mine, broadcast_object(mine))


class Siamese(keras.Model):
    """Learns from three rows at a time, as a data set yields them; its ``call`` takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.layers.Dense(CODES)

    def call(self, pair: Any) -> Any:
        first, second = pair
        return keras.ops.sum((self.network(first) - self.network(second)) ** 2, axis=-1)

    def train_step(self, data: Any) -> dict[str, Any]:
        anchor, near, far = data

        def loss_on() -> Any:
            return keras.ops.mean(keras.ops.relu(self((anchor, near)) - self((anchor, far)) + 1.0))

        return {"own_loss": apply_gradients(loss_on, self, self.optimizer)}


def case_data_that_are_not_meant_for_call():
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(tuple(rows(seed=each) for each in range(3))).batch(BATCH)

    def trained(model: keras.Model) -> list[np.ndarray]:
        model.fit(batches, epochs=2, shuffle=False, verbose=0)
        return weights(model)

    def make(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        return made(Siamese)

    expected = of_one_rank(lambda: trained(make(1)))
    with strategy().scope():
        model = make(1 + choros.rank())
    for mine, other in zip(trained(model), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


# ── what a step receives ─────────────────────────────────────────────────────────────────────────────


class Noting(keras.Model):
    """Notes the structures that its steps receive, and trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, FEATURES))
        self.built = True
        self.received: dict[str, str] = {}

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, *args: Any) -> Any:
        return self._note("train", *args)

    def test_step(self, *args: Any) -> Any:
        return self._note("test", *args)

    def _note(self, kind: str, *args: Any) -> Any:
        self.received.setdefault(kind, described(args[-1]))
        if BACKEND != "jax":
            return {"zero": 0.0}
        return {"zero": 0.0}, args[0]


def described(data: Any) -> str:
    if isinstance(data, (tuple, list)):
        return f"{type(data).__name__}({', '.join(map(described, data))})"
    if isinstance(data, dict):
        return f"dict({', '.join(f'{name}={described(value)}' for name, value in data.items())})"
    return "None" if data is None else "array"


def received(road: str, *data: Any, **weight: Any) -> dict[str, str]:
    with strategy().scope() if road == "strategy" else keras.name_scope("own"):
        model = Noting()
        optimizer: Any = keras.optimizers.SGD(0.1)
        model.compile(
            optimizer=hvd.DistributedOptimizer(optimizer) if road == "horovod" else optimizer, jit_compile=JIT
        )
    if road == "horovod":
        packed = keras.utils.pack_x_y_sample_weight(*data, **weight)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        shard = hvd.shard(packed, batch_size=BATCH)
        model.fit(shard, validation_data=shard, shuffle=False, verbose=0, callbacks=callbacks)
    else:
        held_out = (*data, *weight.values()) if len(data) > 1 else data[0]
        model.fit(*data, **weight, validation_data=held_out, batch_size=BATCH, shuffle=False, verbose=0)
    return dict(model.received)  # Keras has made it a dict of its own


def case_what_a_step_receives():
    x, y, weight = rows(), rows(seed=1), np.ones(N, "float32")
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x, y), {}),
        ((x, y), {"sample_weight": weight}),
        (({"a": x, "b": y},), {}),
        (({"a": x}, [y, y]), {}),
    ]
    for data, weights_of in cases:
        expected = of_one_rank(functools.partial(received, "plain", *data, **weights_of))
        for road in ROADS:
            assert received(road, *data, **weights_of) == expected, road


# ── a replica's share of a batch ─────────────────────────────────────────────────────────────────────


def stateful(batch: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4, FEATURES), batch_size=batch), keras.layers.SimpleRNN(3, stateful=True), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=JIT)
    return model


def case_a_fixed_number_of_rows():
    """The declared batch is a replica's share of the global one."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(32, 4, FEATURES)).astype("float32"), generator.normal(size=(32, 1)).astype("float32")
    with strategy().scope():
        model = stateful(8)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    for mine in weights(model):
        np.testing.assert_array_equal(mine, broadcast_object(mine))


# ── float8 ───────────────────────────────────────────────────────────────────────────────────────────


def scales(road: str, n: int, micro_batches: int | None) -> list[np.ndarray]:
    """The input's scale and its largest values after two epochs, whose gradients Keras assigns to them."""
    keras.utils.set_random_seed(1)
    x, y = rows(n) * np.linspace(1, 9, n, dtype="float32")[::-1, None], rows(n, 1)[:, :1]
    with strategy().scope() if road == "strategy" else contextlib.nullcontext():
        model = layers(8, 1, width=FEATURES)
        for layer in model.layers:
            layer.quantize("float8")
        optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=micro_batches)
        if road == "horovod":
            optimizer = hvd.DistributedOptimizer(optimizer, shard_state=micro_batches is None)
        model.compile(optimizer, "mse", jit_compile=JIT)
    if road == "horovod":
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(hvd.shard((x, y), batch_size=BATCH), epochs=2, shuffle=False, verbose=0, callbacks=[start])
    else:
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    first = model.layers[0]
    return [np.array(keras.ops.convert_to_numpy(each)) for each in (first.inputs_scale, first.inputs_amax_history)]


def case_scales_of_float8():
    """They are those of the largest values of all ranks, also of the micro-batches of an update, and on a rank that
    has no row of the last batch, with slices, too.
    """
    for size in ((4 * BATCH, 2), (2 * BATCH + 1, None)):
        expected = of_one_rank(functools.partial(scales, "plain", *size))
        for road in ROADS:
            for mine, alone in zip(scales(road, *size), expected, strict=True):
                np.testing.assert_allclose(mine, alone, rtol=1e-6, err_msg=road)
