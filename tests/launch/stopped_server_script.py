"""A job with parameter servers in which the server is stopped after the first epoch."""

import os
import signal
from pathlib import Path

import keras
import numpy as np

from choros import distribute

role = distribute.cluster_resolver.TFConfigClusterResolver().task_type
Path(role).write_text(str(os.getpid()))
strategy = distribute.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")


def stop(epoch, logs):
    if epoch == 1:
        os.kill(int(Path("ps").read_text()), signal.SIGSTOP)


x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=stop)])
