"""Trains with local SGD, where the last batch of an epoch has one row; ``asks``: rank 0 asks the job to end in the last
step of all ranks in the first epoch. Prints the number of epochs.
"""

import os
import signal
import sys

import keras
import numpy as np
from faults import process_above

import choros.keras as hvd
from choros.comm import global_process_set

hvd.init()


def ask(batch, logs):
    if (hvd.rank(), batch) == (0, 4) and sys.argv[1] == "asks":
        os.kill(process_above("chorosrun"), signal.SIGTERM)
        while not global_process_set.communicator.notice:
            pass


model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = hvd.shard((np.ones((41, 3)), np.ones((41, 1))), batch_size=8)
others = [hvd.LocalSGDCallback(every=1), keras.callbacks.LambdaCallback(on_train_batch_begin=ask)]
elastic = hvd.callbacks.ElasticCallback(data, others)
print(len(model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[elastic, *others]).history["loss"]))
