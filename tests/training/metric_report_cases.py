"""How far ``fit`` is, as rank 0 emits it for ``choros top``."""

from __future__ import annotations

from itertools import pairwise

import keras
import numpy as np
import pytest

import choros.keras as hvd
from choros.observe import events
from choros.observe.events import Event, Kind

BATCHES = 6


def fit(callbacks: list[keras.callbacks.Callback], epochs: int = 3) -> tuple[list[Event], keras.callbacks.History]:
    """What is emitted while a model trains, and its history."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", metrics=["mae"])
    rows = np.random.default_rng(hvd.rank()).normal(size=(8 * BATCHES, 4)).astype("float32")
    received: list[Event] = []
    stop = events.listen(received.append, {Kind.METRICS})
    history = model.fit(
        rows, rows[:, :1], batch_size=8, epochs=epochs, verbose=0, validation_data=(rows, rows[:, :1]),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks],
    )  # fmt: skip
    stop()
    return received, history


def case_rank_0_reports_each_batch_at_most_once_a_second() -> None:
    received, history = fit([hvd.callbacks.MetricAverageCallback()])
    assert not {"on_train_batch_end", "on_epoch_begin", "on_train_end"} & vars(history).keys()
    if hvd.rank() > 0:
        assert not received
        return
    first, last = received[0], received[-1]
    assert {name: first.details[name] for name in ("epoch", "epochs", "batch", "batches")} == {
        "epoch": 1, "epochs": 3, "batch": 1, "batches": BATCHES,
    }  # fmt: skip
    assert (last.details["epoch"], last.details["batch"]) == (3, BATCHES)
    assert last.details["logs"] == pytest.approx({name: values[-1] for name, values in history.history.items()})
    assert all(after.time - before.time > 0.9 for before, after in pairwise(received[:-1]))


def case_the_callbacks_of_users_see_batches_as_without_it() -> None:
    seen: list[int] = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    received, _ = fit([counting], epochs=1)
    assert seen == list(range(BATCHES))
    assert bool(received) == (hvd.rank() == 0)
