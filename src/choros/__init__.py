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
    from choros.comm.context import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
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
    from choros.parallel.reduce.noise import NoiseScale, noise_scale
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
    "NoiseScale",
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
    "noise_scale",
    "rank",
    "remove_process_set",
    "run",
    "shard_range",
    "shutdown",
    "size",
]

#: Where names are that are in none of ``_MODULES``, of which the first that has a name is used.
_HOMES = {
    "NoiseScale": "choros.parallel.reduce.noise",
    "noise_scale": "choros.parallel.reduce.noise",
    "run": "choros.launch.run",
    "shard_range": "choros.topology",
}
_MODULES = ("choros.errors", "choros.comm", "choros.comm.context")


def __getattr__(name: str) -> object:
    if name not in __all__:
        where = "" if name.startswith("__") else _where(name)  # AutoGraph asks each module for __module__
        raise AttributeError(f"module 'choros' has no attribute {name!r}{where}")
    from importlib import import_module

    if name == "nn":  # a module, which its import binds
        return import_module("choros.nn")
    homes = [_HOMES[name]] if name in _HOMES else _MODULES
    value: object = getattr(next(home for home in map(import_module, homes) if hasattr(home, name)), name)
    globals()[name] = value
    return value


def _where(name: str) -> str:
    """Says which faces have a public name, by the lists in their sources: an import would load their frameworks."""
    import re
    from pathlib import Path

    folder, faces = Path(__file__).parent, ("keras", "torch", "tensorflow", "jax", "distribute")
    if name in faces:
        return f" yet: import choros.{name}"

    def lists(source: Path) -> bool:
        names = re.findall(r"__all__ \+?= \[(.*?)\]", source.read_text("utf-8"), re.DOTALL) if source.exists() else ()
        return any(f'"{name}"' in each for each in names)

    shared = lists(folder / "parallel/horovod.py")
    having = [
        f"choros.{face}"
        for face in faces
        if (shared and face != "distribute")
        or any(lists(folder / face / each) for each in ("__init__.py", "collectives.py"))
    ]
    return f". It is in {', '.join(having)}" if having else ""


def load_ipython_extension(shell: object) -> None:
    """Called by ``%load_ext choros`` in a notebook, which then has the cell magic ``%%choros``."""
    from importlib import import_module

    import_module("choros.notebook").load(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
