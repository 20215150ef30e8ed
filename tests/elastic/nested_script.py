"""A strategy's ``fit`` in a function of ``elastic.run``: rank 1 is killed in it; the function goes on until there are
as many ranks as at the start. Prints, as JSON, what the function has returned. Argument ``ends``: in place of that,
chorosrun gets SIGTERM there, or, with ``goes on``, nothing happens.
"""

import json
import os
import signal
import sys

import keras
import numpy as np
from faults import process_above

import choros
import choros.distribute as dist
import choros.keras as hvd
from choros.comm import global_process_set

choros.init()
is_new, number, size = global_process_set.communicator.is_new, choros.rank(), choros.size()
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
with dist.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")


class Killed(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if number == 1 and not is_new and (state.calls, batch) == (1, 1):
            if len(sys.argv) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if "ends" in sys.argv:
                os.kill(process_above("chorosrun"), signal.SIGTERM)


@hvd.elastic.run
def train(state):
    while state.calls < 3 or choros.size() < size:
        model.fit(x, x[:, :1], batch_size=12, verbose=0, callbacks=[Killed()])
        state.calls += 1
        state.commit()
    return state.calls


state = hvd.elastic.KerasState(model, calls=0)
result = train(state)
report = {"number": number, "new": is_new, "size": choros.size(), "result": result, "calls": state.calls}
report["updates"] = int(model.optimizer.iterations)
print(json.dumps(report), flush=True)
