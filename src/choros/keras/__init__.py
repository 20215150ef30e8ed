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

from choros.comm import (
    ProcessSet,
    Reduction,
    add_process_set,
    global_process_set,
    init,
    is_initialized,
    remove_process_set,
    shutdown,
)
from choros.comm.ranks import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from choros.keras import callbacks
from choros.keras.collectives import allgather, allreduce, alltoall, broadcast, reducescatter
from choros.keras.data import shard
from choros.keras.local_sgd import DiLoCoCallback, LocalSGDCallback
from choros.keras.normalization import SyncBatchNormalization
from choros.keras.optimizer import DistributedOptimizer
from choros.keras.saving import load_model
from choros.parallel.compression import Compression
from choros.parallel.objects import allgather_object, broadcast_object
from choros.parallel.ops import barrier
from choros.topology import shard_range
from choros.training.device import pin_device
from choros.training.model_variables import broadcast_global_variables
from choros.training.variables import broadcast_variables

Average = Reduction.AVERAGE
Sum = Reduction.SUM
Min = Reduction.MIN
Max = Reduction.MAX
Product = Reduction.PRODUCT

if _keras.backend.backend() == "jax":
    from choros.training.device import spare_xla_thread as _spare_xla_thread

    _spare_xla_thread()

__all__ = [
    "Average",
    "Compression",
    "DiLoCoCallback",
    "DistributedOptimizer",
    "LocalSGDCallback",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "pin_device",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shard",
    "shard_range",
    "shutdown",
    "size",
]
