"""choros: data-parallel deep learning for people who know Horovod or tf.distribute.

``import choros`` loads no framework; ``import choros.keras as hvd`` is Horovod's Keras API.
"""

import importlib
from typing import TYPE_CHECKING, Any

from choros.comm import (
    ProcessSet,
    add_process_set,
    global_process_set,
    init,
    is_initialized,
    remove_process_set,
    shutdown,
)
from choros.comm.ranks import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from choros.errors import (
    ChorosError,
    ClosureCancelled,
    ConfigError,
    EngineError,
    EngineUnavailable,
    HostUnreachable,
    JobTimeout,
    LaunchError,
    MismatchError,
    NotInitializedError,
    ParameterServerLost,
    StrategyError,
    WorkerFailed,
)
from choros.topology import shard_range

if TYPE_CHECKING:
    from choros import nn
    from choros.launch.run import run

__version__ = "0.1.0"

__all__ = [
    "ChorosError",
    "ClosureCancelled",
    "ConfigError",
    "EngineError",
    "EngineUnavailable",
    "HostUnreachable",
    "JobTimeout",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "ParameterServerLost",
    "ProcessSet",
    "StrategyError",
    "WorkerFailed",
    "__version__",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "nn",
    "rank",
    "remove_process_set",
    "run",
    "shard_range",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("choros.nn")
    # The processes that the launcher starts do not need it.
    if name == "run":
        from choros.launch.run import run

        return run
    raise AttributeError(f"module 'choros' has no attribute {name!r}")
