"""Saves a model twice, and is killed while it writes it again: ``killed_while_saving.py KIND DIRECTORY``."""

import os
import shutil
import signal
import sys
from pathlib import Path

import keras

from choros import distribute

kind, directory = sys.argv[1], Path(sys.argv[2])


class Killer(keras.layers.Dense):
    """Kills this process when its variables are written for the second time."""

    written = 0

    def save_own_variables(self, store):
        super().save_own_variables(store)
        Killer.written += 1
        if Killer.written == 2:
            os.kill(os.getpid(), signal.SIGKILL)


with distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), Killer(2)])


def save():
    if kind == "sharded weights":
        model.save_weights(directory / "model" / "model.weights.json", max_shard_size=5e-8)
    else:
        model.export(directory / "model", verbose=False)


if kind == "sharded weights":
    (directory / "model").mkdir()
save()
shutil.copytree(directory / "model", directory / "first")
model.set_weights([weight + 1.0 for weight in model.get_weights()])
if kind == "SavedModel":
    from tensorflow.python.saved_model import builder_impl

    builder_impl.copy_assets_to_destination_dir = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save()
