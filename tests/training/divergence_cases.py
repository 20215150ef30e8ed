"""A flipped bit in the weights of one rank, while it trains."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest

import choros
import choros.keras as hvd
from choros.errors import DriftError
from choros.parallel.objects import allgather_object
from choros.settings import current

EVERY, STEPS = 4, 6
BACKEND = keras.backend.backend()


def flip(variable) -> None:
    """Flips a bit of the exponent of one weight."""
    host = np.array(keras.ops.convert_to_numpy(variable))
    host.view(np.uint32).reshape(-1)[3] ^= np.uint32(1 << 25)
    variable.assign(host)


class Flip(keras.callbacks.Callback):
    """Before step STEPS + 1, on the last rank."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and choros.rank() == choros.size() - 1:
            flip(self.model.layers[1].kernel)


def fit() -> keras.Model:
    generator = np.random.default_rng(choros.rank())
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1, name="head")]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=BACKEND == "jax")
    x = generator.normal(size=(STEPS * 4, 8)).astype("float32")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Flip()]
    model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    return model


def assert_same(arrays) -> None:
    hosts = [np.array(keras.ops.convert_to_numpy(array)) for array in arrays]
    for others in allgather_object(hosts):
        for mine, other in zip(hosts, others, strict=True):
            np.testing.assert_array_equal(mine, other)


def case_a_flipped_bit_is_found_in_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choros.settings._config", replace(current(), compare_every=EVERY))
    who = rf" \(rank {choros.size() - 1} has others than most\)" if choros.size() > 2 else ""
    expected = rf"after step 8, ranks have different values of \d of 4 .* first of '[^']*head/kernel'{who}\."
    with pytest.raises(DriftError, match=expected):
        fit()


class Assigns(keras.Model):
    """Moves its weights by its own rows, and no optimizer does."""

    def train_step(self, *arguments):
        x, *_ = arguments[-1]
        if BACKEND == "jax":
            (trained, *others), _ = arguments
            return {"seen": keras.ops.mean(x)}, ([each + keras.ops.mean(x) for each in trained], *others)
        for each in self.trainable_variables:
            each.assign_add(keras.ops.broadcast_to(keras.ops.mean(x), each.shape))
        return {"seen": keras.ops.mean(x)}


class RateOfOwnBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (1 + choros.rank())


@pytest.mark.parametrize("mode", ["steps that assign weights", "learning rates"])
def case_ranks_that_train_by_their_own_rows_are_found_within_an_epoch(mode: str) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    model = (Assigns if mode.startswith("steps") else keras.Model)(inputs, keras.layers.Dense(1)(inputs))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=BACKEND == "jax")
    x = np.random.default_rng(choros.rank()).normal(size=(STEPS * 4, 8)).astype("float32")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), RateOfOwnBatches()]
    expected = "after step 1, " if mode.startswith("steps") else r"after step [24], "
    with pytest.raises((DriftError, *_errors_of_graphs()), match=expected):
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=callbacks[: 1 + (mode == "learning rates")])


def _errors_of_graphs() -> tuple[type[Exception], ...]:
    if BACKEND != "tensorflow":
        return ()
    import tensorflow as tf

    return (tf.errors.OpError,)


def case_ranks_are_healed_in_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choros.settings._config", replace(current(), compare_every=EVERY, divergence="heal"))
    assert_same(fit().weights)


def case_ranks_differ_without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases above would notice nothing if the bit were not flipped in what is trained."""
    monkeypatch.setattr("choros.settings._config", replace(current(), compare_every=0))
    with pytest.raises(AssertionError, match="not equal"):
        assert_same(fit().weights)
