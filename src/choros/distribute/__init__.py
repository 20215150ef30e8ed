"""tf.distribute's programming model, for Keras 3 on TensorFlow, PyTorch and JAX.

::

    from choros import distribute

    strategy = distribute.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([…])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64 * strategy.num_replicas_in_sync)

Started with ``chorosrun -np 4 python train.py``, four processes each train on their share of every batch.
"""

from choros.distribute import cluster_resolver, coordinator, experimental
from choros.distribute.communication import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RunOptions,
)
from choros.distribute.current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from choros.distribute.datasets import AutoShardPolicy
from choros.distribute.input_context import InputContext, InputOptions, InputReplicationMode
from choros.distribute.mirrored import MirroredStrategy
from choros.distribute.multi_worker import MultiWorkerMirroredStrategy
from choros.distribute.one_device import OneDeviceStrategy
from choros.distribute.parameter_server import ParameterServerStrategy, Server
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replica_context import ReplicaContext
from choros.distribute.strategy import Strategy
from choros.distribute.tpu import TPUStrategy
from choros.distribute.values import PerReplica
from choros.frameworks import choose_keras_backend as _choose_keras_backend

_choose_keras_backend()  # before the script imports Keras

__all__ = [
    "AutoShardPolicy",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "TPUStrategy",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
