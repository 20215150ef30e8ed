"""Processes that save a model again and again, each killed at a random moment; what they leave is loaded after each.

``killed_writers.py DIRECTORY KILLS`` prints what did not load, or is neither the last complete state nor the next.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

from choros.training.files import complete_files

directory, kills = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(13)


def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(64), keras.layers.Dense(64)])
    model.compile("adam", keras.losses.MeanSquaredError())
    model.optimizer.build(model.trainable_variables)
    complete_files()
    return model


def backup_of(model, path):
    backup = keras.callbacks.BackupAndRestore(path, double_checkpoint=True)
    backup.set_model(model)
    return backup


def save_backup(model, path):
    backup_of(model, path).on_epoch_end(int(model.get_weights()[0].flat[0]) - 1)


def load_backup(path):
    model = build()
    backup_of(model, path).on_train_begin()
    assert model._initial_epoch == model.get_weights()[0].flat[0], model._initial_epoch
    return model


def load_weights(path):
    model = build()
    model.load_weights(path)
    return model


load_model = keras.saving.load_model
KINDS = {
    "model.keras": (lambda model, path: model.save(path), load_model),
    "model.h5": (lambda model, path: model.save(path), load_model),
    "model.weights.h5": (lambda model, path: model.save_weights(path), load_weights),
    "model.weights.json": (lambda model, path: model.save_weights(path, max_shard_size=2e-5), load_weights),
    "directory": (lambda model, path: model.save(path, zipped=False), load_model),
    "backup": (save_backup, load_backup),
}


def write(model, save, path, state, acknowledge=lambda: None):
    model.set_weights([np.full_like(weight, state) for weight in model.get_weights()])
    save(model, path)
    acknowledge()


def killed(model, save, path, first, seconds):
    """Saves the states ``first``, ``first + 1``, … in a process, and kills it; returns how many were complete."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for state in itertools.count(first):
            write(model, save, path, state, lambda: os.write(writing, b"."))
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as complete:
        return len(complete.read())


def problems(kind):
    save, load = KINDS[kind]
    folder = directory / kind.replace(".", "-")
    folder.mkdir()
    path, model, last = str(folder / kind), build(), 1
    write(model, save, path, last)
    begin, files = time.perf_counter(), {each.name for each in folder.iterdir()}
    write(model, save, path, last)
    one_write = time.perf_counter() - begin
    for _ in range(kills):
        complete = killed(model, save, path, last + 1, rng.uniform(0, 2 * one_write))
        try:
            weights = load(path).get_weights()
            states = {float(value) for weight in weights for value in np.unique(weight)}
            assert states in ({last + complete}, {last + complete + 1}), (states, last, complete)
            last = int(states.pop())
        except Exception as error:  # noqa: BLE001
            yield f"{kind}, state {last}: {type(error).__name__}: {error}"
    for state in (last + 1, last + 2):
        write(model, save, path, state)
    left = {each.name for each in folder.iterdir()} - files
    shards = {name for name in left if kind.endswith(".json") and name.startswith("model_0")}
    if left - shards or len(shards) > 8:
        yield f"{kind}: left behind: {sorted(left)}"


print(json.dumps([each for kind in KINDS for each in problems(kind)]))
