"""choros: data-parallel deep learning for people who know Horovod or tf.distribute.

``import choros`` loads neither a framework nor NumPy: a name is imported when it is first used, because chorosrun and
its wrappers share this package. ``import choros.keras as hvd`` is Horovod's Keras API.
"""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import of typing
if TYPE_CHECKING:
    from choros import nn
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
        PeerLostError,
        StrategyError,
        WorkerFailed,
    )
    from choros.launch.run import run
    from choros.topology import shard_range

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
    "PeerLostError",
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

_COMM = (
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "init",
    "is_initialized",
    "remove_process_set",
    "shutdown",
)
_RANKS = ("cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size")
#: Where a name comes from, if not from ``choros.errors``.
_HOMES = {
    **dict.fromkeys(_COMM, "choros.comm"),
    **dict.fromkeys(_RANKS, "choros.comm.ranks"),
    "run": "choros.launch.run",
    "shard_range": "choros.topology",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'choros' has no attribute {name!r}")
    from importlib import import_module

    if name == "nn":  # a module, which its import binds
        return import_module("choros.nn")
    value: object = getattr(import_module(_HOMES.get(name, "choros.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
