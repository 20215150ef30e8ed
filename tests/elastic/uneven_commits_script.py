"""Trains in ``fit`` by ``hvd.elastic.run`` with a ``KerasState``, whose optimizer's state is in slices. Rank 2 has more
batches, and commits after each, also when the others have none left. Row i of the data counts once in each epoch; with
a momentum of 1, the optimizer's state is the sum of all gradients.

Arguments: the number of micro-batches of an update; ``lost``: rank 2 kills rank 1 when that has no batches left, and
the others go back to the last commit, and end; or ``replaced``: rank 1 is killed in its second batch, and rank 2 waits
in its sixth until it knows of a new rank. Prints a line of JSON on each rank that is left.
"""

import json
import os
import signal
import sys
import time

import keras
import numpy as np

import choros.keras as hvd
from choros.comm import NEWCOMER, global_process_set
from choros.training.sliced_optimizer import whole_values

ROWS, BATCH, LAST = 600, 3, 7
passes, what = int(sys.argv[1]), sys.argv[2]
hvd.init()
communicator = global_process_set.communicator
number, size, is_new = hvd.rank(), hvd.size(), communicator.is_new
pids = [] if is_new else hvd.allgather_object(os.getpid())
model = keras.Sequential([keras.Input((ROWS,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
optimizer = keras.optimizers.SGD(1.0, momentum=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, backward_passes_per_step=passes, shard_state=True)
model.compile(optimizer, lambda y_true, y_pred: keras.ops.sum(y_pred))
rows = np.eye(ROWS, dtype="float32")
first = [0, 2 * BATCH, 4 * BATCH, ROWS]
own = rows[first[number] : first[number + 1]]


class Kills(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if what == "lost" and (number, batch) == (2, LAST):
            os.kill(pids[1], signal.SIGKILL)
        if what == "replaced" and (number, batch) == (1, 1) and not is_new:
            os.kill(os.getpid(), signal.SIGKILL)
        while (number, batch) == (2, 5) and hvd.size() < size and not communicator.noticed & NEWCOMER:
            communicator.barrier()
            time.sleep(0.01)


@hvd.elastic.run
def train(state):
    if what == "replaced" or hvd.size() == size:
        callbacks = [hvd.callbacks.MetricAverageCallback(), hvd.elastic.CommitStateCallback(state), Kills()]
        zeros = np.zeros((len(own), 1), "float32")
        model.fit(own, zeros, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)


train(hvd.elastic.KerasState(model))
*accumulated, momentum = (each[:, 0] for each in whole_values(optimizer) if each.ndim == 2)
counts = sum(accumulated) / passes - momentum  # of the accumulated gradients, updates take the mean
report = {
    "rank": number,
    "size": hvd.size(),
    "trained": np.flatnonzero(counts).tolist(),
    "counts": sorted(set(counts.tolist())),
}
print(json.dumps(report), flush=True)
