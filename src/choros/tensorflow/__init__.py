"""Horovod's TensorFlow API.

::

    import tensorflow as tf
    import choros.tensorflow as hvd

    hvd.init()
    optimizer = keras.optimizers.SGD(0.01 * hvd.size())

    @tf.function
    def step(x, y, first):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss
"""

try:
    import tensorflow as _tf  # noqa: F401  (reports missing TensorFlow before any other import fails)
except ImportError as _error:
    raise ImportError("choros.tensorflow needs TensorFlow: pip install 'choros[tensorflow]'.") from _error

from choros.parallel import horovod as _horovod
from choros.parallel.horovod import *
from choros.tensorflow import collectives as _collectives
from choros.tensorflow import elastic
from choros.tensorflow.collectives import *  # type: ignore[assignment]  # two in place of those of all faces
from choros.tensorflow.optimizer import DistributedOptimizer, LocalGradientAggregationHelper
from choros.tensorflow.reduction import join
from choros.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from choros.tensorflow.variables import (
    BroadcastGlobalVariablesHook,
    broadcast_,
    broadcast_global_variables,
    broadcast_variables,
)
from choros.training.horovod_optimizer import PartialDistributedOptimizer
from choros.training.normalization import SyncBatchNormalization

__all__ = [
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_variables",
    "elastic",
    "join",
]
__all__ += _collectives.__all__
__all__ += [name for name in _horovod.__all__ if name not in _collectives.__all__]
