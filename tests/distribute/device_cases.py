"""Strategies whose replicas are the devices of one process on JAX; run by ``test_devices.py`` on forced host devices.

The reference is a plain Keras model on one device: same initial weights, same batches, no strategy.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from choros import distribute
from choros.distribute import job
from choros.distribute.cluster_resolver import TPUClusterResolver
from choros.distribute.strategies import TPUStrategy
from choros.distribute.types import PerReplica
from choros.errors import ConfigError, EngineUnavailable, StrategyError
from keras_face.training_cases import BATCH, CLASSES, EVEN, FEATURES, UNEVEN, order_dependent

N = jax.local_device_count()
LOSS = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


@functools.cache
def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


def context() -> distribute.ReplicaContext:
    return distribute.get_replica_context()


def data(n: int = UNEVEN) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(n, FEATURES)).astype("float32"), generator.integers(0, CLASSES, n)


def plain(optimizer: Any, **compile_args: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(16), keras.layers.Dense(CLASSES)])
    model.compile(optimizer=optimizer, loss=LOSS(), metrics=["accuracy"], **compile_args)
    return model


def fit(model: keras.Model, *args: Any, **kwargs: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(2)  # Keras shuffles
    return model.fit(*(args or data()), **{"batch_size": BATCH, "epochs": 2, "verbose": 0, **kwargs}).history


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-4) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=rtol / 10), ours, theirs)


def assert_same(ours: keras.Model, theirs: keras.Model) -> None:
    assert_close(*([np.asarray(weight.value) for weight in model.weights] for model in (ours, theirs)))


def both(build: Callable[[Any], keras.Model], optimizer: Callable[[], Any]) -> tuple[keras.Model, keras.Model]:
    """Returns a model of the strategy, and one of plain Keras."""
    with strategy().scope():
        ours = build(optimizer())
    return ours, build(optimizer())


@functools.cache
def trained() -> tuple[keras.Model, keras.Model]:
    """Both after 20 steps."""
    pair = both(order_dependent, lambda: keras.optimizers.Adam(0.01, clipnorm=0.2))
    histories = [fit(model, epochs=4, validation_data=data(11)) for model in pair]
    assert_close(*histories)
    return pair


# Keras -----------------------------------------------------------------------------------------


def case_twenty_steps_equal_those_of_one_device():
    """Shuffled by Keras itself, from one seed."""
    assert strategy().num_replicas_in_sync == N
    assert_same(*trained())


def case_evaluate_and_predict_are_in_the_order_of_the_data():
    ours, theirs = trained()
    x, y = data()
    assert_close(*(model.predict(x, batch_size=BATCH, verbose=0) for model in (ours, theirs)))
    assert_close(*(model.evaluate(x, y, verbose=0) for model in (ours, theirs)))


def case_single_batches():
    ours, theirs = both(plain, lambda: keras.optimizers.SGD(0.1))
    x, y = data(11)
    for method in ("train_on_batch", "test_on_batch"):
        assert_close(*(getattr(model, method)(x, y) for model in (ours, theirs)))
    assert_close(*(model.predict_on_batch(x) for model in (ours, theirs)))
    assert_close(*(model.train_on_batch(x[:1], y[:1]) for model in (ours, theirs)))  # the last of a data set
    assert_same(ours, theirs)


def case_accumulation_with_clipping_averaged_weights_and_several_steps_an_execution():
    def optimizer():
        settings = {"global_clipnorm": 0.2, "gradient_accumulation_steps": 2}
        return keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3, **settings)

    pair = both(functools.partial(plain, steps_per_execution=2), optimizer)
    assert_close(*(fit(model, *data(EVEN)) for model in pair))
    assert_same(*pair)


def case_all_devices_skip_the_overflow_of_one_example():
    x, y = data(12)
    x[-1] = 1e38
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy().scope():
            model = plain("sgd")
    finally:
        keras.config.set_dtype_policy("float32")
    before = model.get_weights()
    fit(model, x, y, epochs=1)
    assert_close(model.get_weights(), before, rtol=0)
    assert float(model.optimizer.dynamic_scale.value) == model.optimizer.initial_scale / 2


class Devices(keras.callbacks.Callback):
    """Records the number of devices of the weights during training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def on_train_batch_end(self, batch, logs=None):
        state = self._model._jax_state["trainable_variables"]
        self.seen |= {len(value.sharding.device_set) for value in state}


def case_all_devices_train_and_weights_end_on_one():
    devices = Devices()
    with strategy().scope():
        model = plain("sgd")
    fit(model, callbacks=[devices])
    assert devices.seen == {N}
    assert all(len(weight.value.sharding.device_set) == 1 for weight in model.weights)
    assert not distribute.has_strategy()


def case_files_equal_those_of_keras():
    """Saved under the strategy; loaded outside, and inside, where the loaded model trains on all devices."""
    ours, _ = trained()
    x, _ = data(11)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.keras"
        ours.save(path)
        ours.save_weights(Path(directory) / "model.weights.h5")
        loaded = keras.saving.load_model(path)
        with strategy().scope():
            inside = keras.saving.load_model(path)
            inside.load_weights(Path(directory) / "model.weights.h5")
    assert_close(loaded(x), ours(x))
    assert_same(inside, ours)
    devices = Devices()
    fit(inside, epochs=1, callbacks=[devices])
    assert devices.seen == {N}


class Batches(keras.utils.PyDataset):
    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.arrays = data(size)

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // self.batch_size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return tuple(array[rows] for array in self.arrays)


def case_data_sets_have_global_batches():
    """Including those that have been distributed to replicas."""
    pair = both(plain, lambda: keras.optimizers.SGD(0.1))
    distributed = strategy().experimental_distribute_dataset(Batches(UNEVEN, BATCH))
    for ours in (Batches(UNEVEN, BATCH), distributed):
        given = zip(pair, (ours, Batches(UNEVEN, BATCH)), strict=True)
        assert_close(*(fit(model, data, batch_size=None, shuffle=False, epochs=1) for model, data in given))
    assert_same(*pair)


def case_a_global_batch_smaller_than_the_replicas():
    with strategy().scope():
        model = plain("sgd")
    small = N - 1
    message = f"a global batch of {small} examples is smaller than the {N} replicas"
    with pytest.raises(ConfigError, match=message):
        fit(model, *data(), batch_size=small)
    with pytest.raises(ConfigError, match=message):
        fit(model, Batches(UNEVEN, small), batch_size=None)
    with pytest.raises(ConfigError, match=message):
        model.train_on_batch(*data(small))


def case_compiling_again():
    pair = both(plain, lambda: keras.optimizers.SGD(0.1))
    fit(pair[0], *data(BATCH), epochs=1)
    fit(pair[1], *data(BATCH), epochs=1)
    with strategy().scope():
        pair[0].compile(keras.optimizers.SGD(0.3), LOSS())
    pair[1].compile(keras.optimizers.SGD(0.3), LOSS())
    devices = Devices()
    fit(pair[0], *data(11), epochs=1, callbacks=[devices])
    fit(pair[1], *data(11), epochs=1)
    assert devices.seen == {N}
    assert_same(*pair)


# Custom loops ----------------------------------------------------------------------------------


def shard(array: np.ndarray) -> PerReplica:
    return PerReplica(np.array_split(array, N))


class State(NamedTuple):
    trainable: Any
    non_trainable: Any
    optimizer: Any
    metric: Any


class Loop:
    """A training loop: with a strategy, or on one device."""

    def __init__(self, on: distribute.Strategy | None, optimizer: Callable[[], Any]) -> None:
        self.on = on
        self.calls = 0
        with (on or distribute.get_strategy()).scope():
            keras.utils.set_random_seed(1)
            self.model = keras.Sequential(
                [keras.Input((FEATURES,)), keras.layers.Dense(16), keras.layers.Dense(CLASSES)]
            )
            self.optimizer = optimizer()
            self.optimizer.build(self.model.trainable_variables)
            self.metric = keras.metrics.SparseCategoricalAccuracy()
        self.loss = LOSS(reduction=None)
        #: The stateless step is compiled on one device too, which is faster.
        self.on_one_device = functools.cache(
            lambda function: jax.jit(function) if function == self.stateless else function
        )

    def gradients(self, trainable: Any, non_trainable: Any, x: Any, y: Any) -> tuple[Any, Any]:
        def loss(trainable: Any) -> tuple[Any, Any]:
            outputs, changed = self.model.stateless_call(trainable, non_trainable, x, training=True)
            return jnp.sum(self.loss(y, outputs)) / BATCH, (changed, outputs)

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    def stateless(self, state: State, batch: Any) -> tuple[Any, State]:
        self.calls += 1
        x, y = batch
        (loss, (non_trainable, outputs)), gradients = self.gradients(state.trainable, state.non_trainable, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(state.optimizer, gradients, state.trainable)
        metric = self.metric.stateless_update_state(state.metric, y, outputs)
        return loss, State(trainable, non_trainable, optimizer, metric)

    def stateful(self, batch: Any) -> Any:
        self.calls += 1
        x, y = batch
        variables = self.model.trainable_variables
        (loss, (_, outputs)), gradients = self.gradients([variable.value for variable in variables], [], x, y)
        self.optimizer.apply(gradients, variables)
        self.metric.update_state(y, outputs)
        return loss

    def batches(self, n: int) -> Any:
        batches = Batches(n, BATCH)
        return (
            self.on.experimental_distribute_dataset(batches)
            if self.on
            else map(batches.__getitem__, range(len(batches)))
        )

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.on_one_device(function)(*args) if self.on is None else self.on.run(function, args=args)

    def total(self, loss: Any) -> float:
        return float(loss if self.on is None else self.on.reduce("SUM", loss, axis=None))

    def train_stateless(self, n: int, epochs: int = 4) -> tuple[list[float], State]:
        objects = (self.model.trainable_variables, self.model.non_trainable_variables)
        objects = (*objects, self.optimizer.variables, self.metric.variables)
        state = State(*([variable.value for variable in variables] for variables in objects))
        losses = []
        for _ in range(epochs):
            for batch in self.batches(n):
                loss, state = self.run(self.stateless, state, batch)
                losses.append(self.total(loss))
        return losses, state

    def train_stateful(self, n: int) -> list[float]:
        return [self.total(self.run(self.stateful, batch)) for batch in self.batches(n)]


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, clipnorm=0.2)


def check_loop(n: int, optimizer: Callable[[], Any], epochs: int = 4) -> Loop:
    loops = Loop(strategy(), optimizer), Loop(None, optimizer)
    (losses, state), (expected, reference) = (loop.train_stateless(n, epochs) for loop in loops)
    assert_close(losses, expected)
    assert_close([value.values[-1] for value in state.trainable], reference.trainable)
    correct = strategy().reduce("SUM", state.metric, axis=None)
    assert_close(correct, reference.metric)
    return loops[0]


def case_a_loop_of_twenty_steps_with_uneven_batches():
    check_loop(UNEVEN, adam)


def case_a_loop_is_compiled_once_per_kind_of_state():
    """Keras' arrays in the first step, sharded ones afterwards; each is traced for its variables, then compiled."""
    loop = check_loop(EVEN, adam)
    assert loop.calls == 4


def case_a_loop_with_a_loss_scale():
    check_loop(EVEN, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), epochs=1)


def case_a_loop_that_assigns_variables():
    """Weights, the optimizer's state, and a metric over the examples of all replicas."""
    ours, theirs = Loop(strategy(), adam), Loop(None, adam)
    assert_close(ours.train_stateful(UNEVEN), theirs.train_stateful(UNEVEN))
    assert_same(ours.model, theirs.model)
    assert float(ours.metric.result()) == float(theirs.metric.result())
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations) == 5


def case_an_optimizer_is_applied_in_replicas_only():
    loop = Loop(strategy(), adam)
    gradients = [jnp.zeros(variable.shape) for variable in loop.model.trainable_variables]
    with strategy().scope(), pytest.raises(StrategyError, match=r"strategy\.run"):
        loop.optimizer.apply(gradients, loop.model.trainable_variables)


# run -------------------------------------------------------------------------------------------


def numbers() -> PerReplica:
    return PerReplica([float(index) for index in range(N)])


def values(structure: Any, replica: int = N - 1) -> Any:
    return jax.tree.map(lambda value: value.values[replica], structure)


def case_arguments_and_results_of_all_kinds():
    def step(own, common, text, *, flag, nothing, model):
        assert text == "text"
        assert flag is True
        assert nothing is None
        assert model is strategy
        x = own["x"][0]
        return State(x + common, None, [x.sum(), 2], (own["n"], context().replica_id_in_sync_group))

    batch = PerReplica([{"x": (np.full((2, 3), index),), "n": 10 * index} for index in range(N)])
    kwargs = {"flag": True, "nothing": None, "model": strategy}
    result = strategy().run(step, args=(batch, np.ones(3), "text"), kwargs=kwargs)
    last = N - 1
    assert_close(values(result), State(np.full((2, 3), last + 1.0), None, [6 * last, 2], (10 * last, last)))
    devices = [value.devices() for value in result.trainable.values]
    assert devices == [{device} for device in jax.local_devices()]
    assert strategy().experimental_local_results(result.optimizer[1]) == (2,) * N


def case_collectives_in_replicas():
    def step(x):
        replica = context()
        assert replica.num_replicas_in_sync == N
        gathered = replica.all_gather(x[None, None], axis=1)
        return replica.all_reduce("SUM", [x, None, 1]), replica.all_reduce("MEAN", {"x": x}), gathered

    summed, mean, gathered = values(strategy().run(step, args=(numbers(),)))
    assert_close(summed, [sum(range(N)), None, N])
    assert_close(mean, {"x": (N - 1) / 2})
    assert_close(gathered, np.arange(float(N))[None])


def case_gradients_flow_through_collectives():
    """The gradient of a sum over replicas is the sum of their gradients; likewise that of a gather."""

    def step(x):
        weight = x + 1
        of_sum = jax.grad(lambda x: weight * context().all_reduce("SUM", x * x))(x)
        of_gather = jax.grad(lambda x: weight * context().all_gather(x[None], axis=0).sum())(x)
        return of_sum, of_gather

    total = sum(index + 1 for index in range(N))
    assert_close(values(strategy().run(step, args=(numbers(),))), (2 * (N - 1) * total, total))


def case_synchronized_batch_normalization_in_a_step():
    """Outputs, statistics and gradients are those of one device with the rows of all replicas."""
    x = np.random.default_rng(0).normal(size=(4 * N, FEATURES)).astype("float32") + 2
    with strategy().scope():
        ours = keras.layers.BatchNormalization(momentum=0.5, synchronized=True)
    theirs = keras.layers.BatchNormalization(momentum=0.5)

    def step(layer, rows):
        def loss(rows):
            own = [[variable.value for variable in each] for each in (layer.trainable_variables, statistics)]
            outputs, updated = layer.stateless_call(*own, rows, training=True)
            return jnp.sum(jnp.sin(3 * outputs)), (outputs, updated)

        statistics = layer.non_trainable_variables
        (_, (outputs, updated)), gradient = jax.value_and_grad(loss, has_aux=True)(rows)
        return outputs, updated, gradient

    for layer in (ours, theirs):
        layer.build(x.shape)
    outputs, updated, gradient = strategy().run(functools.partial(step, ours), args=(shard(x),))
    expected = step(theirs, jnp.asarray(x))
    assert_close((strategy().gather(outputs, axis=0), strategy().gather(gradient, axis=0)), (expected[0], expected[2]))
    assert_close(values(updated), expected[1])


def case_merge_call_runs_in_cross_replica_context():
    def merged(on, x, *, factor):
        assert on is strategy()
        assert distribute.in_cross_replica_context()
        return on.reduce("SUM", factor * x, axis=None), on.gather(x[None], axis=0), on.reduce("MEAN", x[None], axis=0)

    def step(x):
        return context().merge_call(merged, args=(x,), kwargs={"factor": 2})

    expected = 2 * sum(range(N)), np.arange(float(N)), (N - 1) / 2
    assert_close(values(strategy().run(step, args=(numbers(),))), expected)


def case_replicas_with_batches_of_different_shapes():
    def step(x, factor):
        replica = context()
        gathered = replica.all_gather(x, axis=0)
        everything = replica.merge_call(lambda on, x: on.reduce("MEAN", x, axis=0), args=(x,))
        return x * factor, replica.all_reduce("SUM", x.sum()), gathered, everything, replica.replica_id_in_sync_group

    rows = np.arange(N + 1.0)
    own, total, gathered, mean, replica = strategy().run(step, args=(shard(rows), 2))
    assert_close([len(value) for value in own], [len(part) for part in shard(rows).values])
    assert_close(strategy().gather(own, axis=0), 2 * rows)
    assert_close(values((total, gathered, mean, replica)), (rows.sum(), rows, rows.mean(), N - 1))
    assert own.values[1].devices() == {jax.local_devices()[1]}


def case_collectives_of_different_shapes_within_jit_are_an_error():
    with pytest.raises(ConfigError, match="drop_remainder"):
        strategy().run(jax.jit(lambda x: context().all_reduce("SUM", x.sum())), args=(shard(np.arange(N + 1.0)),))


def case_reduce_and_gather():
    reduce, gather = strategy().reduce, strategy().gather
    assert reduce("SUM", numbers(), axis=None) == sum(range(N))
    assert reduce("MEAN", PerReplica(range(N)), axis=None) == (N - 1) / 2
    assert (reduce("SUM", 3, axis=None), reduce("MEAN", 3, axis=None)) == (3 * N, 3)
    assert reduce("SUM", keras.Variable(3.0), axis=None) == 3 * N
    rows = np.arange(2.0 * (2 * N + 1)).reshape(-1, 2)
    assert_close(reduce("SUM", {"x": shard(rows)}, axis=0), {"x": rows.sum(0)})
    assert_close(reduce("MEAN", shard(rows), axis=0), rows.mean(0))
    assert_close(reduce("MEAN", shard(rows > 3), axis=0), (rows > 3).mean(0), rtol=1e-6)
    batches = PerReplica([(part, {"x": part}) for part in shard(rows)])
    assert_close(reduce("SUM", batches, axis=0), (rows.sum(0), {"x": rows.sum(0)}))
    assert_close(gather(shard(rows), axis=0), rows)
    assert gather(np.ones((2, 3)), axis=1).shape == (2, 3 * N)
    with pytest.raises(ConfigError, match="pass axis=0"):
        reduce("SUM", shard(rows), axis=None)
    with pytest.raises(ConfigError, match="no such dimension"):
        reduce("SUM", numbers(), axis=0)
    with pytest.raises(ConfigError, match="no such dimension"):
        gather(numbers(), axis=0)
    with pytest.raises(ConfigError, match="differ in that dimension only"):
        gather(shard(rows), axis=1)


def case_a_state_is_not_copied_from_step_to_step():
    arrays = strategy().replicas._arrays

    def step(state):
        return state + 1

    state = strategy().run(step, args=(PerReplica([np.zeros(3)] * N),))
    first = arrays.global_array(state)
    assert arrays.global_array(state) is first
    pointers = [part.unsafe_buffer_pointer() for part in state.values]
    assert [shard.data.unsafe_buffer_pointer() for shard in first.addressable_shards] == pointers
    assert_close(values(strategy().run(step, args=(state,))), np.full(3, 2.0))


def case_compiled_steps_live_as_long_as_their_functions():
    calls = []

    @dataclass
    class Trainer:  # cannot be hashed
        def step(self, x):
            calls.append(self)
            return x + 1

    def step(x):
        calls.append(None)
        return x * 2

    trainer = Trainer()
    for _ in range(3):
        assert_close(values(strategy().run(step, args=(numbers(),))), 2.0 * (N - 1))
        assert_close(values(strategy().run(trainer.step, args=(numbers(),))), float(N))
    assert len(calls) == 4  # each is traced for its variables, then compiled
    calls.clear()
    gone = weakref.ref(trainer), weakref.ref(step)
    del trainer, step
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def case_a_function_reads_current_values_of_variables():
    with strategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])

    def predict(x):
        return model(x, training=False)

    for factor in (1.0, 3.0):
        model.set_weights([np.full((2, 1), factor)])
        outputs = strategy().run(predict, args=(shard(np.ones((N, 2))),))
        assert_close(strategy().gather(outputs, axis=0), np.full((N, 1), 2 * factor))


def case_aggregation_of_variables_that_replicas_assign_differently():
    kinds = ("sum", "mean", "none", "only_first_replica")
    with strategy().scope():
        created = {kind: keras.Variable(1.0, trainable=False, aggregation=kind) for kind in kinds}
        created["number"] = keras.Variable(1, trainable=False, dtype="int32")

    def step(x):
        for variable in created.values():
            variable.assign_add(keras.ops.cast(x, variable.dtype))
        return created["sum"] * 1

    mean = 1 + (N - 1) / 2
    expected = {"sum": 1 + sum(range(N)), "mean": mean, "none": mean, "only_first_replica": 1, "number": 1}
    own = strategy().run(step, args=(numbers(),))
    assert_close({name: np.asarray(variable.value) for name, variable in created.items()}, expected)
    assert_close(own.values[-1], N - 1)  # only the first replica starts from the sum
    strategy().run(lambda: created["sum"].assign(0.0))
    assert float(created["sum"].value) == 0


def case_variables_created_in_a_function_have_values_afterwards():
    layer = keras.layers.Dense(2)
    outputs = strategy().run(lambda x: layer(x), args=(shard(np.ones((N, 3))),))
    assert_close(outputs.values[0], np.ones((1, 3)) @ np.asarray(layer.kernel.value))


# Invalid uses ------------------------------------------------------------------------------------


def case_invalid_uses_raise_errors_with_advice():
    run = strategy().run
    with pytest.raises(StrategyError, match=r"get_replica_context\(\)\.all_reduce"):
        run(lambda x: strategy().reduce("SUM", x, axis=None), args=(numbers(),))
    for traced in (jax.jit, jax.grad):
        with pytest.raises(StrategyError, match=r"outside of jax\.jit"):
            traced(lambda x: run(lambda x: x, args=(x,)))(1.0)
    with pytest.raises(ConfigError, match=f"there are {N} replicas"):
        run(lambda x: x, args=(PerReplica([1.0] * (N + 1)),))
    with pytest.raises(ConfigError, match="no such dimension"):
        run(lambda x: context().all_gather(x, axis=0), args=(numbers(),))
    with pytest.raises(StrategyError, match="outside of the replicas"):
        strategy().replicas.all_reduce(distribute.ReduceOp.SUM, 1.0)
    assert not distribute.has_strategy()


def case_devices_by_name():
    chosen = distribute.MirroredStrategy(devices=["/cpu:1", "CPU:0"])
    assert chosen.num_replicas_in_sync == 2
    replica = chosen.run(lambda: context().replica_id_in_sync_group)
    assert [value.devices() for value in replica.values] == [{jax.devices()[1]}, {jax.devices()[0]}]
    assert chosen.extended.worker_devices == (str(jax.devices()[1]), str(jax.devices()[0]))
    for names in (["gpu:0", "cpu:0"], ["cpu:0", "/cpu:0"], ["processor"]):
        with pytest.raises(ConfigError, match=r"cpu:"):
            job.local_devices(names)


def case_one_device_of_several():
    on = distribute.OneDeviceStrategy("/cpu:1")
    with on.scope():
        model = plain("sgd")
    model.train_on_batch(*data(11))
    (_, second, *_) = jax.devices()
    assert {device for weight in model.weights for device in weight.value.devices()} == {second}
    assert on.run(lambda: jnp.ones(3)).devices() == {second}


class HostDevices:
    """A resolver that returns the host's devices as TPUs."""

    def tpu_devices(self) -> list[Any]:
        return jax.local_devices()


def case_tpus_train_like_other_devices():
    on = TPUStrategy(HostDevices())
    assert on.num_replicas_in_sync == N
    with on.scope():
        model = plain(adam())
    theirs = plain(adam())
    assert_close(*(each.train_on_batch(*data(11)) for each in (model, theirs)))
    assert_same(model, theirs)
    assert_close(on.reduce("SUM", on.run(lambda x: x + 1, args=(numbers(),)), axis=None), sum(range(N + 1)))


def case_no_tpu():
    for make in (TPUStrategy, TPUClusterResolver.connect):
        with pytest.raises(EngineUnavailable, match=r"platform 'cpu' and has found cpu:0, cpu:1") as caught:
            make()
        assert isinstance(caught.value, ValueError)  # as TensorFlow's
    with pytest.raises(ConfigError, match="leave experimental_device_assignment"):
        TPUStrategy(HostDevices(), experimental_spmd_xla_partitioning=True)
