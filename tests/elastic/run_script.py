"""A Keras model in a function of ``elastic.run``: rank 1 is killed in its second validation, and replaced.

The others wait in the middle of the next epoch for the new rank. Prints a line of JSON on each rank.
"""

import json
import os
import signal
import time

import keras
import numpy as np

import choros.keras as hvd
from choros.comm import NEWCOMER, global_process_set

ROWS, BATCH = 96, 8
hvd.init()
communicator = global_process_set.communicator
number, size, is_new = hvd.rank(), hvd.size(), communicator.is_new


class Rows(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones_like(y_true))


class Fault(keras.callbacks.Callback):
    validations = 0

    def on_train_batch_begin(self, batch, logs=None):
        while hvd.size() < size and batch == 5 and not is_new and not communicator.noticed & NEWCOMER:
            communicator.barrier()
            time.sleep(0.01)

    def on_test_batch_begin(self, batch, logs=None):
        if (number, self.validations, batch) == (1, 1, 1) and not is_new:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_test_end(self, logs=None):
        self.validations += 1


fault, found = Fault(), []
x, y = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
model = keras.Sequential([keras.Input((ROWS,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=[Rows(name="rows")])
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
        fault,
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append((logs["rows"], logs["val_rows"]))),
    ]
    data, validation = (hvd.shard((x[:rows], y[:rows]), batch_size=BATCH) for rows in (ROWS, 30))
    settings = {"verbose": 0, "shuffle": False, "callbacks": callbacks}
    model.fit(data, validation_data=validation, epochs=4 - state.epoch, **settings)


train(state)
print(json.dumps({"number": number, "size": hvd.size(), "epoch": state.epoch, "rows": sorted(set(found))}), flush=True)
