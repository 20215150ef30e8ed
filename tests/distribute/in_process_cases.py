"""Clusters of ``distribute.Server``s in the chief's process."""

from __future__ import annotations

import inspect
import linecache
import runpy
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import cloudpickle
import keras
import numpy as np
import pytest

from choros import distribute
from choros.arrays import framework_adapter
from choros.errors import ConfigError, EngineError, StrategyError
from choros.parallel.reduce.gradients import SparseRows
from choros.parameter_server import closures
from choros.parameter_server.cluster import JobServer
from choros.parameter_server.placement import Shard
from choros.parameter_server.server import Shards
from choros.settings import current
from harness import free_port

FRAMEWORK = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(50, 8)).astype("float32")
Y = X[:, :3].argmax(1)
BATCH = 16
PARTITIONER = distribute.experimental.partitioners.MinSizePartitioner(64, max_shards=2)


def start_servers(workers, ps):
    """Starts the servers of a cluster in this process; returns its resolver."""
    cluster = {
        role: [f"localhost:{free_port()}" for _ in range(count)] for role, count in (("worker", workers), ("ps", ps))
    }
    for role, addresses in cluster.items():
        for index in range(len(addresses)):
            server = distribute.Server(cluster, role, index, protocol="grpc")
            assert server.target == f"grpc://{cluster[role][index]}"
    return distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")


@contextmanager
def cluster_of(workers, ps=2):
    strategy = distribute.ParameterServerStrategy(start_servers(workers, ps), PARTITIONER)
    yield strategy
    strategy.role.close()


def network(optimizer):
    def dense(units, seed, **arguments):
        return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **arguments)

    model = keras.Sequential([keras.Input((8,)), dense(16, 1, activation="relu"), dense(3, 2)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def train(model, epochs=1):
    return model.fit(X, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history


def assert_same(model, alone):
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def case_a_server_that_learns_of_a_job_after_its_workers():
    job = JobServer.job

    def late(server, name, kept=None):
        time.sleep(0.3 if isinstance(kept, Shards) else 0)
        return job(server, name, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobServer, "job", late)
        with cluster_of(1) as strategy:
            with strategy.scope():
                model = network("sgd")
            train(model)
    alone = network("sgd")
    train(alone)
    assert_same(model, alone)


def case_fit_then_schedule_then_fit_again_like_one_device():
    """Everything is created after the cluster, some of it after the first fit."""
    alone = network(keras.optimizers.Adam(0.01))
    with cluster_of(workers=1) as strategy:
        with strategy.scope():
            model = network(keras.optimizers.Adam(0.01))
        history = train(model, 2)
        for metric, values in train(alone, 2).items():
            np.testing.assert_allclose(history[metric], values, rtol=1e-3)
        assert_same(model, alone)

        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            seen = keras.metrics.Sum()

        def measure(iterator):
            x, y = next(iterator)
            seen.update_state(keras.ops.ones(len(x)))
            return model.test_on_batch(x, y)[0]

        iterator = iter(coordinator.create_per_worker_dataset(lambda: [(X, Y)]))
        loss = coordinator.schedule(measure, (iterator,))
        coordinator.join()
        np.testing.assert_allclose(coordinator.fetch(loss), alone.evaluate(X, Y, verbose=0)[0], rtol=1e-4)
        assert float(keras.ops.convert_to_numpy(seen.result())) == len(X)

        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        for each, scope in ((model, strategy.scope()), (alone, nullcontext())):
            each.layers[0].trainable = False
            with scope:
                each.compile(keras.optimizers.SGD(0.1), loss, loss_weights=[0.5])
            train(each)
        assert_same(model, alone)


def case_servers_serve_one_chief_after_another():
    resolver = start_servers(workers=1, ps=1)
    alone = network("sgd")
    train(alone)
    for _ in range(2):
        strategy = distribute.ParameterServerStrategy(resolver)
        with strategy.scope():
            model = network("sgd")
        train(model)
        assert_same(model, alone)
        strategy.role.close()


def case_workers_run_functions_concurrently():
    if FRAMEWORK == "jax":
        pytest.skip("on JAX, workers of one process take turns")
    with cluster_of(workers=3, ps=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dropout(0.5, seed=1)])
        results = coordinator.fetch([coordinator.schedule(meet, (model,)) for _ in range(3)])
    assert len({thread for thread, _ in results}) == 3
    assert len({dropped for _, dropped in results}) == 3


def case_three_workers_train_a_model_that_is_built_by_fit():
    with cluster_of(workers=3) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
            model.compile(
                keras.optimizers.Adam(0.02),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        losses = train(model, 6)["loss"]
        assert losses[-1] < losses[0]
        history = model.fit(X, Y, batch_size=len(X), verbose=0)
        assert history.history["loss"][0] < losses[0]


class Layers(keras.Model):
    def __init__(self):
        super().__init__()
        seeds = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
        self.first, self.second = (keras.layers.Dense(3, kernel_initializer=seed) for seed in seeds)

    def call(self, x):
        return self.second(self.first(x))


def case_a_users_model_is_built_by_fit_like_on_one_device():
    models = []
    with cluster_of(workers=1) as strategy:
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                models.append(model := Layers())
                model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            train(model)
    assert_same(*models)


class Steps(Layers):
    """Two optimizers, of what its own step calls; ``traced``: the calls of that in this process."""

    def __init__(self):
        super().__init__()
        self.other = keras.optimizers.Adam(0.02)
        self.traced = 0

    def train_step(self, data):
        import tensorflow as tf

        self.traced += 1
        x, y, *_ = data
        with tf.GradientTape(persistent=True) as tape:
            logits = self.second(self.first(x))
            loss = self.compute_loss(y=y, y_pred=logits)
        for layer, optimizer in ((self.first, self.optimizer), (self.second, self.other)):
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        return self.compute_metrics(x, y, logits)


def case_a_models_own_step_is_traced_on_the_chief_for_its_first_batch_only():
    models, logs = [], []
    with cluster_of(workers=1) as strategy:
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                models.append(model := Steps())
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
            logs += [train(model), model.train_on_batch(X, Y, return_dict=True), train(model, 2)]
    alone, model = models
    assert model.traced == 2  # TensorFlow traces a function again that has created variables
    for one, other in zip(*map(keras.tree.flatten, (logs[:3], logs[3:])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3)
    assert_same(model, alone)


IDS = np.random.default_rng(0).integers(0, 20, size=(48, 5))  # several of one row in a batch


def embedding(**arguments):
    seeds = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(20, 8, embeddings_initializer=seeds[0]),
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer=seeds[1]),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1, **arguments), "mse")
    return model


@pytest.mark.parametrize("arguments", [{}, {"global_clipnorm": 0.1}, {"gradient_accumulation_steps": 2}], ids=str)
def case_embeddings_like_on_one_device(arguments):
    models = []
    with cluster_of(workers=1) as strategy:
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                models.append(model := embedding(**arguments))
            model.fit(IDS, IDS.mean(1) / 20, batch_size=12, shuffle=False, verbose=0)
    assert_same(*models)


def case_a_servers_compiled_update_takes_any_number_of_rows():
    alone, shards = keras.Variable(np.ones((4, 2), "float32")), Shards()
    shards.assign({Shard((0, 0)): np.ones((4, 2), "float32")})
    recipe = cloudpickle.dumps((keras.optimizers.Adam, {"learning_rate": 0.1}))
    shards.register(1, recipe, {(0, 0): (True, None)})
    optimizer = keras.optimizers.Adam(0.1)
    for indices in ([2, 2, 0], [1], [], [3, 3]):
        rows = SparseRows(np.array(indices, "int32"), np.ones((len(indices), 2), "float32"), (4, 2))
        _, changed = shards.push(1, {Shard((0, 0)): rows}, None, 0)
        optimizer.apply([framework_adapter("tensorflow").from_rows(rows.indices, rows.values, (4, 2))], [alone])
        np.testing.assert_allclose(changed[Shard((0, 0))], alone.numpy(), rtol=1e-6)


def case_workers_trace_functions_that_the_chief_has_not():
    import tensorflow as tf

    @tf.function
    def count(n):
        total = tf.constant(0)
        for i in tf.range(n):
            total += i
        return total

    with cluster_of(workers=1, ps=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        assert coordinator.fetch(coordinator.schedule(count, (tf.constant(5),))) == 10


def case_functions_are_sent_with_the_lines_of_cells():
    source, file = "def double(x):\n    return 2 * x\n", "<cell>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    sent = closures.dumps(names["double"], lambda _: None)
    del linecache.cache[file]
    assert inspect.getsource(closures.loads(sent, lambda _: None)) == source


def case_layers_compute_of_large_statistics_what_the_chief_has_computed():
    rows = np.random.default_rng(0).normal(3, 2, size=(8, 17_000)).astype("float32")
    with cluster_of(workers=1, ps=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            normal = keras.layers.Normalization()
            normal.adapt(rows)
            model = keras.Sequential([keras.Input((17_000,)), normal])
        result = coordinator.schedule(lambda: keras.ops.convert_to_numpy(model(rows))).fetch()
        np.testing.assert_allclose(result, keras.ops.convert_to_numpy(model(rows)), rtol=1e-4, atol=1e-5)


def applying(model, optimizer, kernels):
    """Applies ones to these kernels; returns the iterations before and after."""
    before = int(optimizer.iterations)
    variables = [model.layers[i].kernel for i in kernels]
    optimizer.apply([keras.ops.ones(v.shape) for v in variables], variables)
    return before, int(optimizer.iterations)


@pytest.mark.parametrize("make", [lambda: keras.optimizers.Nadam(0.01, use_ema=True), keras.optimizers.AdamW])
def case_steps_with_gradients_for_one_server_only_count_on_all(make):
    """The optimizer is built for all variables, as the worker's then is."""
    ends = []
    with cluster_of(workers=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                model, optimizer = network(None), make()
                optimizer.build(model.trainable_variables)
                optimizer.iterations.assign(100)
            counts = []
            for kernels in ((0,), (1,), (1,), (0, 1), (0,)):
                arguments = model, optimizer, kernels
                alone = isinstance(scope, nullcontext)
                counts.append(applying(*arguments) if alone else coordinator.schedule(applying, arguments).fetch())
            coordinator.join()
            assert counts == [(n, n + 1) for n in range(100, 105)]
            ends.append((model, [keras.ops.convert_to_numpy(each) for each in optimizer.variables]))
    assert_same(*(model for model, _ in ends))
    for one, other in zip(*(slots for _, slots in ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def case_an_optimizer_of_two_models_is_sent_with_both():
    """Each function uses one of them; the optimizer is older, and they are compiled with it."""
    ends = []
    with cluster_of(workers=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                optimizer = keras.optimizers.SGD(0.1)
                models = [network(optimizer) for _ in range(2)]
                optimizer.build([v for model in models for v in model.trainable_variables])
            for model in models:
                alone = isinstance(scope, nullcontext)
                arguments = model, optimizer, (0,)
                applying(*arguments) if alone else coordinator.schedule(applying, arguments).fetch()
            coordinator.join()
            ends.append(models)
    for one, other in zip(*ends, strict=True):
        assert_same(one, other)


def case_gradients_of_variables_that_an_optimizer_does_not_know_are_an_error():
    with cluster_of(workers=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            model, optimizer = network(None), keras.optimizers.SGD(0.1)
        coordinator.schedule(applying, (model, optimizer, (1,))).fetch()
        coordinator.schedule(applying, (model, optimizer, (0, 1)))
        with pytest.raises(ValueError, match="Unknown variable"):
            coordinator.join()
    shards, shard = Shards(), Shard((0, 0))
    shards.assign({shard: np.ones(2, "float32")})
    shards.register(1, cloudpickle.dumps((keras.optimizers.SGD, {})), {(0, 0): (True, None)})
    with pytest.raises(ConfigError, match="does not know"):
        shards.push(1, {shard: np.ones(2, "float32"), Shard((0, 1)): np.ones(2, "float32")}, None, 0)


def raising_its_own(model, optimizer):
    with pytest.raises(Exception, match=r"."):
        optimizer.apply([keras.ops.ones((7,))], model.trainable_variables[1:2])  # of another shape
    raise LookupError("its own")


def case_a_function_that_has_caught_the_error_of_a_server_ends_by_its_own():
    with cluster_of(workers=1) as strategy:
        with strategy.scope():
            model, optimizer = network(None), keras.optimizers.SGD(0.1)
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        coordinator.schedule(raising_its_own, (model, optimizer))
        with pytest.raises(LookupError, match="its own"):
            coordinator.join()


def case_a_function_that_fails_leaves_the_worker_as_it_was():
    with cluster_of(workers=1, ps=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            model = network("sgd")

        def divide(by):
            return len(model.weights) / by

        for _ in range(2):
            coordinator.schedule(divide, (0,))
            with pytest.raises(ZeroDivisionError):
                coordinator.join()
        assert coordinator.schedule(divide, (2,)).fetch() == 2


def case_a_function_that_ends_its_program_ends_the_chief_s():
    """As where it runs there; the worker serves on."""

    def leave():
        raise SystemExit(3)

    with cluster_of(workers=1, ps=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        coordinator.schedule(leave)
        with pytest.raises(SystemExit) as end:
            coordinator.join()
        assert end.value.code == 3
        assert coordinator.schedule(lambda: 1).fetch() == 1


def case_a_function_that_trains_as_the_chief_does_is_an_error():
    def fit(model):
        train(model)

    def train_on_batch(model):
        model.train_on_batch(X, Y)

    def schedule(coordinator):
        coordinator.schedule(lambda: 1)

    with cluster_of(workers=1, ps=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            model = network("sgd")
        for function, given in ((fit, model), (train_on_batch, model), (schedule, coordinator)):
            coordinator.schedule(function, (given,))
            with pytest.raises(StrategyError, match="in a function that a worker runs"):
                coordinator.join()


def case_invalid_servers_are_errors():
    cluster = {"worker": ["localhost:1"], "ps": ["localhost:2"]}
    for role, index, text in (
        ("chief", 0, "needs no server"),
        (None, None, "needs no"),
        ("worker", 1, "worker 0 only"),
    ):
        with pytest.raises(ConfigError, match=text):
            distribute.Server(cluster, role, index)
    with pytest.raises(ConfigError, match="no ps"):
        distribute.Server({"worker": ["localhost:1"]}, "worker", 0)


def case_a_server_whose_chief_does_not_come_says_so(monkeypatch):
    monkeypatch.setattr("choros.settings._config", replace(current(), start_timeout=0.05))
    cluster = {"worker": [f"localhost:{free_port()}"], "ps": [f"localhost:{free_port()}"]}
    for role in cluster:
        with pytest.raises(
            EngineError, match=r"did not connect to .* at localhost:\d+ .* It has not been started, has failed"
        ):
            distribute.Server(cluster, role, 0).join()


_MEETING = threading.Barrier(3)


def meet(model):
    """Returns the thread of the worker, once three workers have called it, and which units it has dropped."""
    _MEETING.wait(30)
    kept = keras.ops.convert_to_numpy(model(np.ones((1, 64), "float32"), training=True))[0]
    return threading.get_ident(), tuple(kept == 0)


def case_the_tutorial_of_tensorflow():
    # Not imported: workers would import it too, and wait for the import to end.
    tutorial = runpy.run_path(str(Path(__file__).with_name("tutorial_parameter_server.py")), run_name="__main__")
    tutorial["strategy"].role.close()
    results = tutorial["RESULTS"]
    assert len(results["fit"]) == 5
    assert results["fit"][-1] < results["fit"][0]
    assert results["files"] == ["ckpt.keras", "log"]  # the backup of a training that has ended is deleted
    assert len(results["accuracy"]) == 12
    assert results["accuracy"][-1] == results["evaluation"] == results["distributed evaluation"] == 1.0
    assert results["evaluated"] == 16
    assert results["loss"] < 0.01
    assert results["global steps"] == 12 * 5 + 1 + 5
    assert results["restored global steps"] == results["global steps"] + 1
