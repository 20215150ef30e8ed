"""Trains by ``hvd.elastic.run`` with a ``KerasState``, of whose optimizer each rank has slices: row i of the data is
trained on once, in a loop; with a momentum of 1, the optimizer's state is the sum of all gradients.

Arguments: where ranks are killed, such as ``1@5,2@9``; ``replaced``: steps 20 and later wait until new ranks have taken
their places; ``clipped``: gradients are clipped to a norm of half of theirs; ``again``: rank 2 is killed, too, when the
others are to receive weights, after the first loss; ``two``: another optimizer has slices, too. Prints a line of JSON
on each rank. New ranks, and those that are started again, are not killed.
"""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
from faults import Faults

import choros.keras as hvd
from choros.comm import global_process_set
from choros.training import elastic_state
from choros.training.sliced_optimizer import whole_values

ROWS, BATCH = 600, 12
hvd.init()
number, size, faults = hvd.rank(), hvd.size(), Faults(sys.argv[1], global_process_set.communicator)
model = keras.Sequential([keras.Input((ROWS,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
norm = BATCH**0.5 / 2 if "clipped" in sys.argv else None
optimizer = keras.optimizers.SGD(1.0, momentum=1.0, global_clipnorm=norm)
optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, shard_state=True)
model.compile(optimizer, lambda y_true, y_pred: keras.ops.sum(y_pred))
if "two" in sys.argv:
    model.second = hvd.DistributedOptimizer(keras.optimizers.Adam(0.0), shard_state=True)
    model.second.build(model.trainable_variables)
rows = np.eye(ROWS, dtype="float32")
broadcast_variables = elastic_state.broadcast_variables


def broadcast_or_die(*args, **given):
    if "again" in sys.argv and number == 2 and hvd.size() < size:
        os.kill(os.getpid(), signal.SIGKILL)
    broadcast_variables(*args, **given)


elastic_state.broadcast_variables = broadcast_or_die


@hvd.elastic.run
def train(state):
    while state.step * BATCH < ROWS:
        faults.come("step")
        if "replaced" in sys.argv and state.step == 20 and hvd.size() < size:
            time.sleep(0.01)
            state.check_host_updates()
            continue
        first = state.step * BATCH
        own = rows[first : first + BATCH][hvd.rank() :: hvd.size()]
        model.train_on_batch(own, np.zeros((len(own), 1), "float32"))
        if "two" in sys.argv:
            model.second.apply([keras.ops.ones((ROWS, 1))], model.trainable_variables)
        state.step += 1
        state.commit()


train(hvd.elastic.KerasState(model, step=0))
held = sum(np.prod(each.shape) for each in optimizer.variables if each.ndim)
whole = list(whole_values(optimizer))
counts = -next(each for each in whole if each.ndim == 2)[:, 0]
if "two" in sys.argv:
    momentum = next(each for each in whole_values(model.second) if each.ndim == 2)
    np.testing.assert_allclose(momentum, 1 - 0.9 ** (ROWS // BATCH), rtol=1e-5)
report = {
    "number": number,
    "size": hvd.size(),
    "wrong": {str(row): float(counts[row]) for row in np.flatnonzero(~np.isclose(counts, 0.5 if norm else 1, 1e-6, 0))},
    "weights": model.get_weights()[0].tobytes().hex()[:200],
    "held": float(held / sum(each.size for each in whole if each.ndim)),
}
print(json.dumps(report), flush=True)
