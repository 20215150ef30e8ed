"""The gradient noise scale in ``fit``: in the logs, the same on all ranks, and without a trace in the weights."""

from __future__ import annotations

import logging
from dataclasses import replace

import keras
import numpy as np
import pytest

import choros
import choros.distribute as tf_distribute
import choros.keras as hvd
from choros.parallel.objects import allgather_object
from choros.settings import current


def fit(monkeypatch: pytest.MonkeyPatch, every: int, *, strategy: bool, **optimizer: int) -> tuple[list, dict]:
    """Two epochs of batches of 12, 12 and 1 rows, of which all ranks but one have none; the weights and the history."""
    monkeypatch.setattr("choros.settings._config", replace(current(), noise_scale=every))
    keras.utils.set_random_seed(3)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(25, 4)).astype("float32")
    y = (x.sum(1, keepdims=True) + generator.normal(size=(25, 1))).astype("float32")
    scope = tf_distribute.MultiWorkerMirroredStrategy().scope if strategy else pytest.MonkeyPatch.context
    with scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        adam = keras.optimizers.Adam(0.01, **optimizer)
        model.compile(adam if strategy else hvd.DistributedOptimizer(adam), "mse")
    if strategy:
        history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    else:
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        part = hvd.shard((x, y), batch_size=12)
        history = model.fit(part, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights], history.history


def check(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, steps: int, **how: int) -> None:
    plain, without = fit(monkeypatch, 0, **how)
    assert "noise_scale" not in without
    assert choros.noise_scale() is None
    with caplog.at_level(logging.WARNING, "choros"):
        weights, history = fit(monkeypatch, 1, **how)
    for mine, other in zip(weights, plain, strict=True):
        np.testing.assert_array_equal(mine, other)
    found = choros.noise_scale()
    assert found is not None
    assert found.steps == steps
    assert found.batch == (24 if "gradient_accumulation_steps" in how else 12)
    assert history["noise_scale"][-1] == found.noise_scale
    assert [each for each in caplog.messages if "rows" in each] == [str(found)] * (choros.rank() == 0)
    for other in allgather_object((found, history["noise_scale"])):
        assert other == (found, history["noise_scale"])


def case_horovods_face(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    check(monkeypatch, caplog, steps=4, strategy=False)


def case_a_strategy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    check(monkeypatch, caplog, steps=4, strategy=True)


def case_accumulation(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    check(monkeypatch, caplog, steps=3, strategy=False, gradient_accumulation_steps=2)
