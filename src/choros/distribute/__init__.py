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

from typing import TYPE_CHECKING

from choros.distribute import cluster_resolver, experimental
from choros.distribute.replicas import ReplicaContext
from choros.distribute.scope import has_strategy, in_cross_replica_context
from choros.distribute.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    TPUStrategy,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
)
from choros.distribute.strategy import Strategy
from choros.distribute.types import (
    AutoShardPolicy,
    HierarchicalCopyAllReduce,
    InputContext,
    InputOptions,
    InputReplicationMode,
    NcclAllReduce,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    RunOptions,
)
from choros.frameworks import choose_keras_backend as _choose_keras_backend

if TYPE_CHECKING:
    from choros.distribute import coordinator
    from choros.parameter_server import ParameterServerStrategy, Server

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


def __getattr__(name: str) -> object:
    """Imports what is asked for of parameter servers: other programs never load them."""
    from importlib import import_module

    if name in ("coordinator", "partitioners"):
        return import_module(f"choros.distribute.{name}")
    if name in ("ParameterServerStrategy", "Server"):
        return getattr(import_module("choros.parameter_server"), name)
    raise AttributeError(f"module 'choros.distribute' has no attribute {name!r}")
