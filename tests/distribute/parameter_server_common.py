"""Helpers shared by the scripts of test_parameter_server.py."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path

import keras
import numpy as np

from distribute.parameter_server_jobs import CASE, GATE

FRAMEWORK = keras.backend.backend()
CLUSTER, TASK = (json.loads(os.environ["TF_CONFIG"])[name] for name in ("cluster", "task"))
WORKER = f"{TASK['index']}.{os.environ['TEST_LIFE']}"
X, Y = np.load("x.npy"), np.load("y.npy")
STEPS, BATCH = 20, 32
#: The minimum bytes per shard: only the kernels of the larger networks are sharded.
SHARD = 64 * 20 * 4


def network(hidden, optimizer, seed=0, norm=False, name=None, kind=keras.Sequential):
    def dense(units, index, **arguments):
        return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed + index), **arguments)

    layers = [keras.Input((64,)), dense(hidden, 1, activation="relu")]
    if norm:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=7)]
    model = kind([*layers, dense(10, 2)], name=name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def train(model, epochs=2, **arguments):
    rows = STEPS // 2 * BATCH
    return model.fit(X[:rows], Y[:rows], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments)


def assert_close(values, others):
    for one, another in zip(values, others, strict=True):
        np.testing.assert_allclose(one, another, rtol=2e-4, atol=2e-6)


def admit_worker(script, coordinator, worker):
    """Opens the gate of a worker, and waits until the worker runs functions."""
    Path(GATE.format(script, "worker", worker)).touch()

    def identify():
        time.sleep(0.02)
        return f"{json.loads(os.environ['TF_CONFIG'])['task']['index']}.{os.environ['TEST_LIFE']}"

    while worker not in coordinator.fetch([coordinator.schedule(identify) for _ in range(2)]):
        pass


def run_cases(names):
    """Runs the cases on the chief; workers serve from the first ``fit`` or ``schedule`` on."""
    for name, case in names.items():
        if name.startswith("case_") and (len(CLUSTER["worker"]) == 2 or "with_two" not in name):
            begin = time.perf_counter()
            try:
                case()
                error = ""
            except Exception:  # noqa: BLE001  (every error is reported as the result)
                error = traceback.format_exc()
            print(CASE + json.dumps({name: error}), f"{time.perf_counter() - begin:.1f} s", flush=True)
