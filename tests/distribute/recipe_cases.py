"""Copies of Keras objects that workers create: the same layers, shared in the same way, with the same results."""

from __future__ import annotations

import threading
import warnings

import keras
import numpy as np
import pytest

from choros.errors import ConfigError
from choros.parameter_server import closures
from choros.parameter_server.scope_objects import ScopeObjects

FRAMEWORK = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")


def copies_of(*models):
    """Returns copies as a worker creates them, with the originals' weights."""
    chief, worker = ScopeObjects(), ScopeObjects()
    for model in models:
        chief.add("created", model)
    shared = [chief.shared_layers(model) for model in models]
    # Models within others are created before them.
    for number in sorted(range(len(models)), key=lambda n: any(tag == "created" for tag, *_ in shared[n].values())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pickled = closures.dumps(models[number], lambda part, of=shared[number]: of.get(id(part)))
            worker.put(("created", number), closures.loads(pickled, worker.resolve))
    copies = [worker.resolve(("created", number)) for number in range(len(models))]
    for copy, model in zip(copies, models, strict=True):
        assert [weight.shape for weight in copy.weights] == [weight.shape for weight in model.weights]
        assert [layer.name for layer in copy.layers] == [layer.name for layer in model.layers]
        copy.set_weights(model.get_weights())
    return copies


def check(*models, x=X):
    copies = copies_of(*models)
    for copy, model in zip(copies, models, strict=True):
        ours, theirs = (keras.ops.convert_to_numpy(each(x)) for each in (copy, model))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    ids = ([[id(weight) for weight in model.weights] for model in group] for group in (copies, models))
    ours, theirs = ([[[a == b for b in many for a in other] for other in group] for many in group] for group in ids)
    assert ours == theirs  # They share the same weights.


def dense(x=None, units=6):
    layer = keras.layers.Dense(units)
    return layer if x is None else layer(x)


class Scaled(keras.layers.Layer):
    """Without ``get_config``; with a function, layers in structures, layers and variables made in ``build``."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.parts = {"a": [dense(units=2)]}

    def build(self, shape):
        self.steps = self.add_weight(shape=(), trainable=False)
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.late = dense(units=shape[-1])
        self.late.build(shape)
        self.parts["a"][0].build(shape)

    def call(self, x):
        return self.parts["a"][0](self.late(self.function(x) * self.scale))


class Own(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.first, self.others = dense(units=units), [dense(units=2)]

    def call(self, x):
        return self.others[0](self.first(x))


class Outer(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((6,)), dense()])
        self.last = dense(units=1)

    def call(self, x):
        return self.last(self.inner(x))


class OwnStep(keras.Model):
    def train_step(self, data):
        return {}


def squashed(x):
    return keras.ops.tanh(x)


def case_sequential_models():
    check(keras.Sequential([keras.Input((6,)), dense(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]))
    built = keras.Sequential([dense(), dense()])
    built(X)
    check(built)


def case_functional_models():
    a = keras.Input((6,), name="a")
    check(keras.Model({"a": a}, keras.ops.mean(dense(a), axis=1)), x={"a": X})
    check(OwnStep(a, Scaled(squashed)(a)))
    deep = a
    for _ in range(150):
        deep = keras.ops.tanh(deep)
    check(keras.Model(a, deep))


def case_the_users_classes():
    check(keras.Sequential([keras.Input((6,)), Scaled(lambda x: 3 * x), keras.layers.Lambda(lambda x: 2 * x)]))
    check(keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation=squashed)]))
    model = Own(5)
    model.compile("adam", lambda y, p: keras.ops.mean(y - p), metrics=["mae"])
    model.fit(X, X[:, :2], verbose=0)
    model.evaluate(X, X[:, :2], verbose=0)
    check(model)


def case_models_that_share_layers():
    a, b = keras.Input((6,)), keras.Input((6,))
    code = dense(a, 3)
    check(keras.Model(a, code), keras.Model(a, dense(code)))
    shared = dense()
    check(keras.Model(a, shared(a)), keras.Model(b, keras.ops.tanh(shared(b))))


def case_models_within_models():
    generator, discriminator = (keras.Sequential([keras.Input((6,)), dense(units=units)]) for units in (6, 1))
    both = keras.Sequential([generator, discriminator])
    both.build((None, 6))
    a = keras.Input((6,))
    check(generator, discriminator, both, keras.Model(a, discriminator(generator(a))))
    encoder = keras.Model(a, dense(a, 3))  # with an input that is another model's, too
    check(encoder, keras.Model(encoder.input, dense(encoder(encoder.input))))
    outer = Outer()
    outer(X)
    check(outer)
    check(outer, outer.inner)


def case_what_layers_keep_besides_weights():
    if FRAMEWORK == "tensorflow":  # which these layers need everywhere
        import tensorflow as tf

        normal = keras.layers.Normalization()
        normal.adapt(X)
        a = keras.Input((6,))
        check(keras.Model(a, dense(normal(a))))
        given, learnt = keras.layers.StringLookup(vocabulary=["x", "y"]), keras.layers.StringLookup()
        learnt.adapt([["y", "z"]])
        words = keras.Input((2,), dtype="string")
        for layer in (given, learnt):
            check(keras.Model(words, layer(words)), x=tf.constant([["x", "y"], ["z", "?"]]))
        text, many = keras.Input((), dtype="string"), [" ".join(f"w{i}" for i in range(17_000)), "w1 w2"]
        counted = keras.layers.TextVectorization(output_mode="tf_idf")  # over 64 KiB, but no weight
        counted.adapt(many)
        check(keras.Model(text, counted(text)), x=tf.constant(many))


def case_large_weights_are_not_sent():
    large = keras.Sequential([keras.Input((6,)), keras.layers.Dense(10_000, kernel_initializer="zeros")])
    assert len(closures.dumps(large, lambda part: None)) < 100_000 < 4 * 6 * 10_000


def case_what_cannot_be_sent_is_an_error():
    model = keras.Sequential([keras.Input((6,)), Scaled(squashed)])
    model.layers[0].lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker: cannot pickle .*lock"):
        closures.dumps(model, lambda part: None)
