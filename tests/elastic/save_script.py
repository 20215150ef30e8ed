"""Saves a model of a strategy; the ranks whose numbers are the argument are killed while they write it."""

import json
import os
import signal
import sys
from pathlib import Path

import keras

import choros.distribute as dist
import choros.keras as hvd

directory, killed = Path(sys.argv[1]), {int(number) for number in sys.argv[2].split(",")}


@keras.saving.register_keras_serializable()
class Layer(keras.layers.Dense):
    def save_own_variables(self, store):
        super().save_own_variables(store)
        if number in killed:
            os.kill(os.getpid(), signal.SIGKILL)


strategy = dist.MultiWorkerMirroredStrategy()
number = hvd.rank()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Layer(1)])
path = directory / ("mine.keras" if number == 3 else "shared.keras")
model.save(path)
files = sorted(each.name for each in directory.glob("*.keras"))
print(json.dumps({"number": number, "size": hvd.size(), "files": files}), flush=True)
