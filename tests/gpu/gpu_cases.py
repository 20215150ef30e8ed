"""What must be on the GPU: the model, and the reduction of its gradients, by the library that the job requests."""

from __future__ import annotations

import os

import keras
import numpy as np

import choros.keras as hvd
from choros.comm.devices import select_devices
from choros.settings import current
from choros.training.device import accelerated
from choros.training.distributed_optimizer import reducer_of


def case_gradients_are_reduced_on_the_gpu() -> None:
    device = hvd.pin_device()
    assert accelerated()
    assert device.startswith("gpu:")
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse")
    model.fit(
        np.ones((8, 4)),
        np.ones((8, 3)),
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    weights = keras.ops.convert_to_numpy(model.weights[0].value)
    np.testing.assert_array_equal(weights, hvd.broadcast(weights, 0))
    if keras.backend.backend() != "jax":
        assert reducer_of(optimizer).reducer.config.device.type == "cuda"
        library = {"nccl4py": "nccl4py_devices", "torch": "torch_devices"}[os.environ["CHOROS_DEVICES"]]
        assert select_devices("mpi", hvd.size(), current())[0] == library
