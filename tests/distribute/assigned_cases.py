"""What functions on workers of parameter servers assign to weights, in one process, as on one device."""

from __future__ import annotations

from contextlib import nullcontext

import keras
import numpy as np
import pytest

from choros import distribute
from choros.errors import ConfigError
from choros.parameter_server.session import ServerSession
from distribute.in_process_cases import FRAMEWORK, Layers, X, Y, assert_same, cluster_of, network, train


def pair():
    """A model, another one of the same weights, and an optimizer for the first."""
    (model, other), optimizer = (network(None) for _ in range(2)), keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer.build(model.trainable_variables)
    return model, other, optimizer


def update(model, optimizer):
    variables = model.trainable_variables
    optimizer.apply([keras.ops.ones(v.shape) for v in variables], variables)


def clip(model):
    for weight in model.weights:
        weight.assign(keras.ops.clip(weight, -0.1, 0.1))


def follow(other, model):
    for weight, new in zip(other.weights, model.weights, strict=True):
        weight.assign(0.5 * weight + 0.5 * new)


def assigning(model, other, optimizer, compiled):
    """Assigns weights after updates of them and before, and weights that the optimizer does not know."""
    functions = update, clip, follow
    if compiled:
        import tensorflow as tf

        functions = map(tf.function, functions)
    one, two, three = functions
    for _ in range(3):
        one(model, optimizer)
        two(model)
        three(other, model)


@pytest.mark.parametrize("compiled", [False, True] if FRAMEWORK == "tensorflow" else [False], ids=str)
def case_what_functions_assign_to_weights_is_on_the_servers(compiled):
    ends = []
    with cluster_of(workers=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                model, other, optimizer = pair()
            for _ in range(2):
                arguments = model, other, optimizer, compiled
                if isinstance(scope, nullcontext):
                    assigning(*arguments)
                else:
                    coordinator.schedule(assigning, arguments).fetch()
            coordinator.join()
            ends.append((model, other))
    for one, two in zip(*ends, strict=True):
        assert_same(one, two)


class Assigning(Layers):
    """Its step clips the weights that it has trained; a frozen layer follows them."""

    def __init__(self):
        super().__init__()
        self.second.trainable = False

    def call(self, x):
        return self.first(x) + self.second(x)

    def train_step(self, *given):
        if FRAMEWORK != "jax":
            result = super().train_step(*given)
            for weight, mean in zip(self.first.weights, self.second.weights, strict=True):
                weight.assign(keras.ops.clip(weight, -0.1, 0.1))
                mean.assign(0.5 * weight + 0.5 * mean)
            return result
        logs, (trained, others, *rest) = super().train_step(*given)
        trained = [keras.ops.clip(weight, -0.1, 0.1) for weight in trained]
        means = [0.5 * weight + 0.5 * mean for weight, mean in zip(trained, others, strict=False)]
        return logs, (trained, [*means, *others[len(means) :]], *rest)


def case_what_a_models_own_step_assigns_is_on_the_servers():
    models = []
    with cluster_of(workers=1) as strategy:
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                models.append(model := Assigning())
                model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            train(model, 2)
    assert_same(*models)


def case_spectral_normalization_like_on_one_device():
    """In training, its forward pass assigns the kernel that is trained."""
    models = []
    with cluster_of(workers=1) as strategy:
        for scope in (nullcontext(), strategy.scope()):
            with scope:
                keras.utils.set_random_seed(1)
                inner = keras.layers.Dense(3)
                model = keras.Sequential([keras.Input((8,)), keras.layers.SpectralNormalization(inner)])
                model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            models.append(model)
            train(model, 2)
    assert_same(*models)


class Annealed(Layers):
    """Multiplies its output by a weight that callbacks assign; an optimizer trains the rest."""

    def __init__(self):
        super().__init__()
        self.factor = self.add_weight(name="factor", initializer="ones", trainable=False)

    def call(self, x):
        return self.factor * super().call(x)


class Annealing(keras.callbacks.Callback):
    """Assigns a weight before each batch that it alone changes; ``trained``: then also those that are trained."""

    def __init__(self, strategy=None, trained=False, then=lambda model: None):
        super().__init__()
        self.strategy, self.trained, self.then = strategy, trained, then

    def on_train_batch_begin(self, batch, logs=None):
        model = self.model
        model.factor.assign(0.5**batch)
        for weight in model.first.weights if self.trained and batch else ():
            weight.assign(0.5 * weight)
        self.then(model)

    def on_train_batch_end(self, batch, logs=None):
        if self.strategy:  # batches that still wait would have what is assigned for later ones
            self.strategy.role._queue.wait()
        self.then(self.model)


def annealed():
    model = Annealed()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model(X)
    return model


def case_a_callback_assigns_weights_while_batches_run():
    with cluster_of(workers=1) as strategy:
        alone = annealed()
        with strategy.scope():
            model = annealed()
        for each, calls in ((alone, Annealing()), (model, Annealing(strategy))):
            each.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[calls])
        assert_same(model, alone)


def case_a_callback_evaluates_what_is_trained_so_far():
    seen = []
    with cluster_of(workers=1) as strategy:
        alone = annealed()
        with strategy.scope():
            model = annealed()
        for each, of in ((alone, None), (model, strategy)):
            seen.append(results := [])

            def look(model, results=results):
                results.append(model.evaluate(X, Y, verbose=0))
                results.append(model.predict(X[:2], verbose=0).sum())

            each.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[Annealing(of, then=look)])
    np.testing.assert_allclose(*seen, rtol=1e-4)


def case_a_callback_that_assigns_what_batches_train_is_an_error():
    """What it has read is of the time before them."""
    with cluster_of(workers=1) as strategy:
        with strategy.scope():
            model = annealed()
        evaluating = keras.callbacks.LambdaCallback()
        evaluating.on_train_batch_begin = lambda batch, logs=None: model.evaluate(X, Y, verbose=0)
        for then in ([], [evaluating]):
            calls = [Annealing(strategy, trained=True), *then]
            with pytest.raises(ConfigError, match=r"kernel' was assigned here while functions run on workers"):
                model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=calls)


def case_variables_that_functions_capture_must_not_change():
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        captured = tf.Variable(1.0)
    else:
        import torch

        captured = torch.nn.Parameter(torch.ones(()))

    def read(variable=captured):
        return float(variable)

    def add(variable=captured):
        (variable.assign_add if FRAMEWORK == "tensorflow" else variable.data.add_)(1.0)

    with cluster_of(workers=1, ps=1) as strategy:
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        for function, arguments in ((read, ()), (read, (captured,))):
            assert coordinator.schedule(function, arguments).fetch() == 1.0
        for function, arguments in ((add, (captured,)), (add, ())):
            coordinator.schedule(function, arguments)
            with pytest.raises(ConfigError, match=r"add has changed a .* copy of its own"):
                coordinator.join()


def case_weights_that_functions_do_not_change_are_not_sent():
    """What a worker has pulled may be old: it must not overwrite what others have pushed since."""
    sent = []
    assign = ServerSession._assign

    def recording(session, values):
        sent.append((session, values))
        assign(session, values)

    def step(model, optimizer):
        if FRAMEWORK == "jax":
            trained, state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
            import jax

            new, state = jax.jit(optimizer.stateless_apply)(state, trained, trained)
            for variable, value in zip(model.trainable_variables, new, strict=True):
                variable.assign(value)
        else:
            update(model, optimizer)

    with cluster_of(workers=1) as strategy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerSession, "_assign", recording)
        coordinator = distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            model = network("sgd")
        train(model)
        for _ in range(2):
            coordinator.schedule(step, (model, model.optimizer)).fetch()
            coordinator.schedule(model.test_on_batch, (X, Y)).fetch()
        coordinator.join()
        chief = strategy.role.session
    assert all(session is chief for session, _ in sent)
