"""Trains a model whose loss is a sum, loses rank 2, and trains one whose loss is a mean. Prints by how much its weights
differ from those that one process gives it.
"""

import json
import os
import signal
from contextlib import nullcontext

import keras
import numpy as np

import choros.keras as hvd
from choros import distribute

strategy = distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
y = x.sum(1, keepdims=True)


def trained(loss, scope):
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
    model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(each) for each in model.weights]


trained(keras.losses.MeanSquaredError(reduction="sum"), strategy.scope())
if hvd.rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
pairs = zip(trained("mse", strategy.scope()), trained("mse", nullcontext()), strict=True)
print(json.dumps({"size": hvd.size(), "difference": max(float(np.abs(a - b).max()) for a, b in pairs)}))
