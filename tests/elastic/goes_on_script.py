"""Trains with dropout, or statistics of rows, a rate that each epoch changes, a log and a backup; prints what there is.

Arguments: ``strategy`` or ``horovod``, the API; the faults (see ``faults.py``); a directory for files.
"""

import contextlib
import json
import sys
from pathlib import Path

import keras
import numpy as np
from faults import Faults

import choros.distribute as dist
import choros.keras as hvd
from choros.comm import global_process_set

api, directory = sys.argv[1], Path(sys.argv[3])
keras.utils.set_random_seed(1)
hvd.init()
faults = Faults(sys.argv[2], global_process_set.communicator, directory)
source = np.random.default_rng(0)
x, y = source.normal(size=(50, 4)).astype("float32"), source.normal(size=(50, 1)).astype("float32")
strategy = dist.MultiWorkerMirroredStrategy() if api == "strategy" else None
with strategy.scope() if strategy else contextlib.nullcontext():
    layer = keras.layers.BatchNormalization() if strategy else keras.layers.Dropout(0.5, seed=1)
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer if strategy else hvd.DistributedOptimizer(optimizer), "mse")
log = directory / "log.csv"
callbacks = [
    keras.callbacks.BackupAndRestore(directory / "backup"),
    keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2),
    keras.callbacks.CSVLogger(log),
    faults.callback(),
]
data = {"x": x, "y": y, "batch_size": 8}
if not strategy:
    data = {"x": hvd.shard((x, y), batch_size=8, shuffle=True), "shuffle": False}
    callbacks = [hvd.callbacks.ElasticCallback(data["x"], callbacks), *callbacks]
history = model.fit(**data, epochs=4, verbose=0, callbacks=callbacks)
trained, statistics = (
    [number for each in weights for number in each.numpy().ravel().tolist()]
    for weights in (model.trainable_weights, model.non_trainable_weights)
)
report = {"trained": trained, "statistics": statistics, "rate": float(model.optimizer.learning_rate.numpy())}
report |= {"epochs": history.epoch}
print(json.dumps(report | {"loss": history.history["loss"], "log": log.read_text().split()}), flush=True)
