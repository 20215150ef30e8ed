"""Horovod's Keras API, for Keras 3 on TensorFlow, PyTorch and JAX.

::

    import choros.keras as hvd

    hvd.init()
    hvd.pin_device()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        hvd.shard((x, y), batch_size=128, shuffle=True),
        shuffle=False,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
    )
"""

from choros.frameworks import choose_keras_backend as _choose_keras_backend
from choros.frameworks import missing_backend as _missing_backend

try:
    _choose_keras_backend()
    import keras as _keras
except ImportError as _error:
    raise ImportError(_missing_backend(_error), name=_error.name) from None

from choros.keras import callbacks, elastic
from choros.keras.collectives import allgather, allreduce, alltoall, broadcast, reducescatter
from choros.keras.data import shard
from choros.keras.local_sgd import DiLoCoCallback, LocalSGDCallback
from choros.parallel import horovod as _horovod
from choros.parallel.horovod import *
from choros.training.device import pin_device
from choros.training.horovod_optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from choros.training.normalization import SyncBatchNormalization
from choros.training.trainer import broadcast_global_variables
from choros.training.variables import broadcast_variables

if _keras.backend.backend() == "jax":
    from choros.arrays.jax_arrays import spare_xla_thread as _spare_xla_thread

    _spare_xla_thread()

__all__ = [
    "DiLoCoCallback",
    "DistributedOptimizer",
    "LocalSGDCallback",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "pin_device",
    "reducescatter",
    "shard",
]
__all__ += _horovod.__all__
