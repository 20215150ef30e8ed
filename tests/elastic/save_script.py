"""Saves a model of a strategy, after ``fit`` or in it: ``save_script.py DIRECTORY RANKS HOW``. The ranks, by their
numbers at the start, are killed while they write; or the disk is full.
"""

import contextlib
import errno
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import choros.distribute as dist
import choros.keras as hvd

directory, killed, how = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]


@keras.saving.register_keras_serializable()
class Layer(keras.layers.Dense):
    def save_own_variables(self, store):
        super().save_own_variables(store)
        if str(number) in killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if "on a full disk" in how:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


strategy = dist.MultiWorkerMirroredStrategy()
number = hvd.rank()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Layer(1)])
    model.compile("adam", "mse")


class Tolerant(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        with contextlib.suppress(OSError if "tolerant" in how else ()):
            super().on_epoch_end(epoch, logs)


if how.startswith("in fit"):
    best = Tolerant(directory / "shared.keras", monitor="loss", save_best_only=True)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0, callbacks=[best])
else:
    model.save(directory / ("mine.keras" if number == 3 else "shared.keras"))
files = sorted(each.name for each in directory.glob("*.keras"))
print(json.dumps({"number": number, "size": hvd.size(), "files": files}), flush=True)
