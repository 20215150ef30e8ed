"""Saves a model twice, and is killed while it writes it again: ``killed_while_saving.py KIND DIRECTORY``."""

import os
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np

import choros.keras as hvd
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


horovods = "Horovod" in kind
with nullcontext() if horovods else distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), Killer(2)])


def save():
    if horovods:
        checkpoint = keras.callbacks.ModelCheckpoint(directory / "model" / "model.keras")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0, callbacks=[start, checkpoint])
    else:
        model.export(directory / "model", verbose=False)


if horovods:
    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
if kind != "SavedModel":
    (directory / "model").mkdir()
save()
shutil.copytree(directory / "model", directory / "first")
model.set_weights([weight + 1.0 for weight in model.get_weights()])
if kind == "SavedModel":
    from tensorflow.python.saved_model import builder_impl

    builder_impl.copy_assets_to_destination_dir = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save()
