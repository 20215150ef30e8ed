"""Trains a model whose weights count: row i of the data is trained on as often as weight i says.

Arguments: ``strategy`` or ``horovod``, the API; where ranks are killed, such as ``1@5,2@70``: rank 1 before its step 5.
``1@5=SIGTERM`` sends another signal, and ``1@5=SIGTERM!`` sends it to chorosrun. Prints a line of JSON on each rank.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import sys

import keras
import numpy as np
import psutil

import choros.distribute as dist
import choros.keras as hvd
from choros.comm import global_process_set

ROWS, BATCH, EPOCHS = 203, 16, 3
api = sys.argv[1]
faults = [re.fullmatch(r"(\d+)@(\d+)=?(\w*)(!?)", each).groups() for each in sys.argv[2].split(",") if each]
started = os.getpid()


class Total(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred[:, 0]


class Rows(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones_like(y_true))


class Kill(keras.callbacks.Callback):
    steps = itertools.count()  # in this process: a number would be part of commits

    def on_train_batch_begin(self, batch, logs=None):
        here = number, next(self.steps)
        for rank, step, name, to_job in faults:
            if (int(rank), int(step)) == here:
                target = psutil.Process().parents()[2].pid if to_job else os.getpid()  # wrapper, mpirun, chorosrun
                os.kill(target, signal.Signals[name or "SIGKILL"])


hvd.init()
communicator = global_process_set.communicator
number = communicator.rank
optimizer = keras.optimizers.SGD(1.0)
strategy = dist.MultiWorkerMirroredStrategy() if api == "strategy" else None
with strategy.scope() if strategy else contextlib.nullcontext():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((ROWS,)), dense])
    model.compile(
        optimizer if strategy else hvd.DistributedOptimizer(optimizer),
        Total(reduction="sum"),
        metrics=[Rows(name="rows")],
    )
rows, zeros = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
data = {"x": rows, "y": zeros, "batch_size": BATCH}
callbacks = [Kill()]
if api == "horovod":
    data = {"x": hvd.shard((rows, zeros), batch_size=BATCH, shuffle=True), "shuffle": False}
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    callbacks = [*own, hvd.callbacks.ElasticCallback(data["x"]), *callbacks]
validation = (rows[:30], zeros[:30])
history = model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks, validation_data=validation)
counts = -model.get_weights()[0][:, 0]
report = {
    "rank": number,
    "same_process": os.getpid() == started,
    "size": communicator.size,
    "wrong": {str(row): float(counts[row]) for row in np.flatnonzero(counts != EPOCHS)},
    "epochs": len(history.history["loss"]),
    "rows": history.history["rows"],
    "val_loss": history.history["val_loss"][-1],
}
print(json.dumps(report), flush=True)
