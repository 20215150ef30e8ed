"""Replicas do not drift apart unseen: what is made outside of the scope, or late, is synchronised or refused.

Run by ``test_drift.py`` on two ranks of each framework, whose random numbers differ.
"""

from __future__ import annotations

import copy
import warnings

import keras
import numpy as np
import pytest

import choros
from choros import nn
from choros.parallel.objects import allgather_object, broadcast_object
from distribute.strategy_cases import (
    BACKEND,
    BATCH,
    CLASSES,
    FEATURES,
    JIT,
    LOSS,
    data,
    directory,
    fit,
    strategy,
    weights,
)

EVEN = 64


def layers() -> keras.Sequential:
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)]
    )


def train(model: keras.Model, optimizer: keras.optimizers.Optimizer, *, replicas: bool = True) -> None:
    """One epoch of a custom loop: of the replicas, or of this process on the whole batches."""
    here = strategy()
    x, y = data(EVEN)
    loss_of = LOSS(reduction="none")

    def loss_on(batch):
        return nn.compute_average_loss(loss_of(batch[1], model(batch[0], training=True)), global_batch_size=BATCH)

    def tensorflow_step(batch):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_on(batch)
        trained = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))

    def torch_step(batch):
        import torch

        model.zero_grad()
        loss_on(batch).backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)

    def jax_step(batch):
        import jax

        if not model.built:
            model(batch[0])
        if not optimizer.built:
            optimizer.build(model.trainable_variables)

        def loss_of_values(trainable, rest):
            outputs, rest = model.stateless_call(trainable, rest, batch[0], training=True)
            return nn.compute_average_loss(loss_of(batch[1], outputs), global_batch_size=BATCH), rest

        @jax.jit
        def update(trainable, rest, moments):
            gradients, rest = jax.grad(loss_of_values, has_aux=True)(trainable, rest)
            return *optimizer.stateless_apply(moments, gradients, trainable), rest

        groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        trainable, moments, rest = update(*([v.value for v in group] for group in groups))
        for group, values in zip(groups, (trainable, rest, moments), strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    step = {"tensorflow": tensorflow_step, "torch": torch_step, "jax": jax_step}[BACKEND]

    def distributed_step(batch):
        return here.run(step, args=(batch,)) if replicas else step(batch)

    if BACKEND == "tensorflow":
        import tensorflow as tf

        distributed_step = tf.function(distributed_step)
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, EVEN, BATCH)]
    if BACKEND == "torch":
        import torch

        batches = [tuple(map(torch.tensor, batch)) for batch in batches]
    for batch in here.experimental_distribute_dataset(batches) if replicas else batches:
        distributed_step(batch)


def assert_trained_as_one(model: keras.Model, start: list[np.ndarray]) -> None:
    """``model`` equals one that a process has trained alone, with plain SGD, from ``start``."""
    alone = layers()
    alone.set_weights(start)
    train(alone, keras.optimizers.SGD(0.1), replicas=False)
    for mine, expected in zip(weights(model), weights(alone), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(mine, broadcast_object(mine))


# ── custom loops ─────────────────────────────────────────────────────────────────────────────────────


def case_an_optimizer_made_outside_of_the_scope_sums_gradients():
    with strategy().scope():
        model = layers()
    start = weights(model)
    train(model, keras.optimizers.SGD(0.1))
    assert_trained_as_one(model, start)


def case_a_model_made_outside_of_the_scope_is_refused_if_replicas_differ():
    with strategy().scope():
        optimizer = keras.optimizers.SGD(0.1)
    keras.utils.set_random_seed(choros.rank())
    with pytest.raises(Exception, match=r"after step 1, ranks have different values of 2 of 4 .*strategy\.scope"):
        train(layers(), optimizer)


def case_a_model_made_outside_of_the_scope_trains_if_replicas_agree():
    keras.utils.set_random_seed(5)
    model = layers()
    start = weights(model)
    train(model, keras.optimizers.SGD(0.1))
    assert_trained_as_one(model, start)


def case_a_model_that_its_first_step_builds():
    with strategy().scope():
        model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.SGD(0.0)
    train(model, optimizer)
    for weight in weights(model):
        np.testing.assert_array_equal(weight, broadcast_object(weight))
    assert len(weights(model)) == 4
    start = weights(model)
    optimizer.learning_rate = 0.1
    train(model, optimizer)
    assert_trained_as_one(model, start)


def case_parameters_of_torch_without_gradients_stay_as_they_are():
    """One has none on any replica, and must not decay; one has one on a single replica, and is the same on both."""
    if BACKEND != "torch":
        return
    import torch

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(3))

        def forward(self, used):
            return sum(self.layers[index](torch.ones(1, 2)).sum() for index in used)

    def step(optimizer, heads, used):
        optimizer.zero_grad()
        heads(used).backward()
        optimizer.step()

    ours, alone = Heads(), Heads()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (ours, alone)]
    for _ in range(3):
        strategy().run(step, args=(optimizers[0], ours, [0, 1] if choros.rank() else [0]))
        step(optimizers[1], alone, [0, 0, 1])
    for mine, expected in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


def case_compiled_modules_of_torch_with_sparse_gradients():
    """Hooks are not compiled; sums are sparse where gradients were, also on a replica that has none."""
    import torch

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1)

        def forward(self, words):
            return self.head(self.table(words)).square().sum()

    def optimizers(words):
        table, *others = words.parameters()
        return torch.optim.SparseAdam([table], lr=0.1), torch.optim.SGD(others, lr=0.1)

    def step(words, steps, batch):
        for optimizer in steps:
            optimizer.zero_grad()
        if len(batch):
            words(batch).backward()
        for optimizer in steps:
            optimizer.step()

    torch.manual_seed(choros.rank())
    ours = Words()
    alone = copy.deepcopy(ours)
    alone.load_state_dict(broadcast_object(ours.state_dict()))
    ours.compile(backend="eager")
    mine, whole = optimizers(ours), optimizers(alone)
    for parts in (([0, 1], [1, 3]), ([2], []), ([], [0, 0])):
        with warnings.catch_warnings():  # torch warns of what it compiles itself
            warnings.simplefilter("ignore")
            strategy().run(step, args=(ours, mine, torch.tensor(parts[choros.rank()], dtype=torch.long)))
        step(alone, whole, torch.tensor([*parts[0], *parts[1]]))
    for trained, expected in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(trained, expected)


def case_modules_and_optimizers_of_torch():
    if BACKEND != "torch":
        return
    import torch

    def made():
        module = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, CLASSES))
        module[1].momentum = 0.0
        return module.eval()

    def step(module, optimizer, batch):
        optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(module(batch[0]), batch[1].long(), reduction="sum")
        (losses / BATCH).backward()
        optimizer.step()

    here = strategy()
    module, alone = made(), made()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    batches = [tuple(torch.tensor(each[i : i + BATCH]) for each in data()) for i in range(0, EVEN + 1, BATCH)]
    alone.load_state_dict(broadcast_object(module.state_dict()))
    alone_optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for batch in here.experimental_distribute_dataset(batches):
        here.run(step, args=(module, optimizer, batch))
    for batch in batches:
        step(alone, alone_optimizer, batch)
    for mine, expected in zip(module.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, broadcast_object(mine), rtol=0, atol=0)

    with pytest.raises(choros.errors.StrategyError, match=r"outside of strategy\.run"):
        step(module, optimizer, batches[0])

    parameter = torch.nn.Parameter(torch.randn(3))
    descent = torch.optim.SGD([parameter], lr=0.1)

    def without_a_module():
        descent.zero_grad()
        parameter.square().sum().backward()
        descent.step()

    with pytest.raises(choros.errors.DriftError, match="parameter 0"):
        here.run(without_a_module)
    with pytest.raises(choros.errors.StrategyError, match="closure"):
        here.run(lambda: descent.step(lambda: 0.0))


# ── fit ──────────────────────────────────────────────────────────────────────────────────────────────


def case_a_model_that_is_built_without_its_layers():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(16, activation="tanh")
            self.unused = keras.layers.Dense(2)
            self.outputs_of = keras.layers.Dense(CLASSES)

        def call(self, x):
            return self.outputs_of(self.hidden(x))

    with strategy().scope():
        model = Subclassed()
        with pytest.warns(UserWarning, match="unbuilt state"):
            model.build((None, FEATURES))
        model.compile("sgd", LOSS(), jit_compile=JIT)
    fit(model, *data(), batch_size=BATCH)
    assert len(weights(model)) == 4
    for weight in weights(model):
        np.testing.assert_array_equal(weight, broadcast_object(weight))


def case_weights_changed_on_one_replica_are_noticed_by_fit():
    class Change(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            if choros.rank() == 1:
                self.model.layers[1].bias.assign_add(np.full(CLASSES, 0.5, "float32"))

    with strategy().scope():
        model = layers()
        model.compile("sgd", LOSS(), jit_compile=JIT)
    with pytest.raises(Exception, match=r"different values of 1 of 4 .*bias': up to 0\.5 between ranks 0 and 1"):
        fit(model, *data(), batch_size=BATCH, callbacks=[Change()])


# ── initial values ───────────────────────────────────────────────────────────────────────────────────


def case_initial_values_that_are_not_trained_agree():
    class Projection(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4), initializer="random_normal", trainable=False)

        def call(self, x):
            return x @ self.kernel

    with strategy().scope():
        layer = Projection()
        layer(np.zeros((1, 3), "float32"))
    first, second = allgather_object(weights(layer)[0])
    np.testing.assert_array_equal(first, second)
    assert np.any(first != 0)


# ── random numbers ───────────────────────────────────────────────────────────────────────────────────


class Noise(keras.layers.Layer):
    """Drops units, in training and in prediction: with a generator of its own, or without a seed."""

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(7) if own else None

    def call(self, x):
        return keras.random.dropout(x, 0.5, seed=self.seed)


def assert_different_but_reproducible(draw) -> None:
    """``draw`` returns the same numbers again from the same state, and other numbers on the other rank."""
    first, again = draw(), draw()
    np.testing.assert_array_equal(first, again)
    mine, others = allgather_object(first)
    assert np.any(mine != others)


def case_random_layers_differ_between_replicas_of_a_custom_loop():
    with strategy().scope():
        layer = Noise()
    states = allgather_object(np.array(keras.ops.convert_to_numpy(layer.seed.state.value)))
    np.testing.assert_array_equal(*states)
    x = keras.ops.ones((4, 8))

    def draw():
        layer.seed.state.assign(states[0])
        return keras.ops.convert_to_numpy(strategy().run(layer, args=(x,)))

    assert_different_but_reproducible(draw)
    after = allgather_object(np.array(keras.ops.convert_to_numpy(layer.seed.state.value)))
    np.testing.assert_array_equal(*after)
    assert np.any(after[0] != states[0])


def case_random_functions_without_a_seed_differ_between_replicas():
    def draw():
        keras.utils.set_random_seed(3)
        noise = Noise(own=False)
        return keras.ops.convert_to_numpy(strategy().run(noise, args=(keras.ops.ones((4, 8)),)))

    assert_different_but_reproducible(draw)
    with strategy().scope():  # initial values
        keras.utils.set_random_seed(3)
        first, second = allgather_object(keras.ops.convert_to_numpy(keras.random.normal((3,))))
    np.testing.assert_array_equal(first, second)


def case_random_layers_differ_between_replicas_in_fit():
    with strategy().scope():
        model = keras.Sequential([keras.Input((8,)), Noise()])
    state = np.array(keras.ops.convert_to_numpy(model.layers[0].seed.state.value))
    rows = model.predict(np.ones((4, 8), "float32"), verbose=0)
    assert np.any(rows[:2] != rows[2:]), "both replicas drop the same units"
    alone = keras.Sequential([keras.Input((8,)), Noise()])
    alone.layers[0].seed.state.assign(state)
    np.testing.assert_array_equal(rows[:2], alone.predict(np.ones((2, 8), "float32"), verbose=0))


def case_dropout_in_fit_differs_between_replicas():
    class Watch(keras.layers.Layer):
        """Keeps the sum of each column; its gradient is that of dropout."""

        def build(self, shape):
            self.kernel = self.add_weight(shape=shape[1:], initializer="ones")

        def call(self, x):
            return x * self.kernel

    def trained() -> np.ndarray:
        keras.utils.set_random_seed(3)
        with strategy().scope():
            model = keras.Sequential([keras.Input((64,)), Watch(), keras.layers.Dropout(0.5)])
            model.compile(keras.optimizers.SGD(32.0), lambda y, outputs: keras.ops.mean(outputs, -1), jit_compile=JIT)
        fit(model, np.ones((2, 64), "float32"), np.zeros((2, 1)), batch_size=2, epochs=1)
        return weights(model)[0]

    first, again = trained(), trained()
    np.testing.assert_array_equal(first, again)
    # Each replica's one row keeps a unit (2) or drops it (0): the mean has ones only where their masks differ.
    assert set(np.unique(first).round(3).tolist()) == {0.0, 0.5, 1.0}


# ── statistics of layers ─────────────────────────────────────────────────────────────────────────────


def case_statistics_of_a_custom_loop_are_averaged_when_read_and_saved():
    with strategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(momentum=0.5)])
    layer = model.layers[0]
    rows = keras.ops.convert_to_tensor(np.full((4, 2), 1.0 + choros.rank(), "float32"))

    def step():
        layer(rows, training=True)
        return keras.ops.convert_to_tensor(layer.moving_mean) * 1

    def run():
        own = strategy().run(step)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(own)[0], (1.0 + choros.rank()) / 2)

    run()
    assert "value" not in repr(layer.moving_mean)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.moving_mean), [0.75, 0.75])
    before = choros.global_process_set.communicator.collectives
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.moving_mean), [0.75, 0.75])
    weights(model)  # gamma and beta; both statistics have been averaged, or are now
    assert choros.global_process_set.communicator.collectives - before <= 1
    for variable in layer.moving_mean, layer.moving_variance:
        variable.assign(np.zeros(2, "float32"))
    run()
    path = f"{broadcast_object(directory())}/model.keras"
    model.save(path)
    saved = keras.models.load_model(path)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(saved.layers[0].moving_mean), [0.75, 0.75])
    for variable in layer.moving_mean, layer.moving_variance:
        variable.assign(np.zeros(2, "float32"))
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.function(lambda: strategy().run(step))()
        np.testing.assert_allclose(layer.moving_mean.numpy(), [0.75, 0.75])
        np.testing.assert_allclose(tf.function(lambda: layer.moving_mean * 2)(), [1.5, 1.5])


# ── reductions ───────────────────────────────────────────────────────────────────────────────────────


def case_reductions_of_integers_over_several_axes_and_of_strings():
    here, rank = strategy(), choros.rank()
    numbers = np.array([[1, 2], [3, 4], [5, 6]][: rank + 2]) * (1 if rank else 0)  # zeros (2, 2), and (3, 2)
    np.testing.assert_allclose(here.reduce("MEAN", numbers, axis=0), [9 / 5, 12 / 5])
    np.testing.assert_allclose(float(here.reduce("MEAN", numbers, axis=(0, 1))), 21 / 10)
    assert int(here.reduce("SUM", numbers, axis=(0, 1))) == 21
    np.testing.assert_array_equal(
        here.gather(np.array([f"rank {rank}"] * (rank + 1)), axis=0), ["rank 0"] + ["rank 1"] * 2
    )
    if BACKEND == "tensorflow":
        import tensorflow as tf

        gathered = here.gather(tf.constant([f"rank {rank}"]), axis=0)
        assert gathered.numpy().tolist() == [b"rank 0", b"rank 1"]
        mean = tf.function(lambda: here.reduce("MEAN", tf.constant(numbers), axis=0))()
        np.testing.assert_allclose(mean, [9 / 5, 12 / 5])


# ── TensorFlow's variables ───────────────────────────────────────────────────────────────────────────


def case_variables_of_tensorflow_are_aggregated_as_they_ask():
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    here, rank = strategy(), choros.rank()
    how, on_read = tf.VariableAggregation, tf.VariableSynchronization.ON_READ
    with here.scope():
        initial = tf.Variable(tf.random.normal((3,), seed=rank))
        written = {kind: tf.Variable(1.0, aggregation=kind) for kind in how}
        read = {kind: tf.Variable(1.0, aggregation=kind, synchronization=on_read) for kind in how}
    first, second = allgather_object(initial.numpy())
    np.testing.assert_array_equal(first, second)

    # Of the values 1 and 2, as tf.distribute's MirroredStrategy aggregates them on two devices.
    for compiled in (False, True):
        for method, start, totals in (("assign", 0.0, (0, 3, 1.5, 1)), ("assign_add", 1.0, (1, 4, 2.5, 2))):
            for variable in [*written.values(), *read.values()]:
                variable.assign(start)
            for variable, total in zip(written.values(), totals, strict=True):

                def run(variable=variable, method=method):
                    return here.run(getattr(variable, method), args=(1.0 + rank,))

                call = tf.function(run) if compiled else run
                if variable.aggregation == how.NONE:
                    with pytest.raises(ValueError, match="aggregation=NONE"):
                        call()
                    assert variable.numpy() == start
                    continue
                call()
                assert variable.numpy() == total, (variable.aggregation, method)
    for kind, total in zip(read, (None, 3.0, 1.5, 1.0), strict=True):
        variable = read[kind]
        own = here.run(lambda variable=variable: variable.assign(1.0 + rank).read_value())
        assert float(own) == 1.0 + rank
        if total is None:
            with pytest.raises(choros.errors.ConfigError, match="aggregation=NONE"):
                variable.numpy()
            continue
        assert variable.numpy() == total == float(variable + 0.0)
        assert float(tf.function(variable.read_value)()) == total
    read[how.SUM].assign(8.0)
    assert here.run(read[how.SUM].read_value).numpy() == 4.0
    with pytest.raises(choros.errors.ConfigError, match="sum of the replicas"):
        read[how.SUM].assign_add(1.0)

    path = broadcast_object(str(directory()))
    here.run(lambda: read[how.SUM].assign(1.0 + rank))
    with here.scope():
        checkpoint = tf.train.Checkpoint(total=read[how.SUM])
    saved = checkpoint.save(f"{path}/checkpoint")
    alone = tf.Variable(0.0)
    tf.train.Checkpoint(total=alone).restore(saved)
    assert alone.numpy() == 3.0
