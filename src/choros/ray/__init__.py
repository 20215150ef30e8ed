"""Data-parallel training on a Ray cluster: ``RayExecutor``, with Horovod's names (extra ``ray``).

::

    driver                        a node of Ray's
    RayExecutor ── places ──────► RayWorker, an actor: holds the CPUs and GPUs of one rank
        │  ▲                         ▲ │ calls
        │  └─ Take ───────────────┐  │ ▼
        │                         └─ rank ◄── wrapper ◄── mpirun ◄─┐
        └─ launches ──────────────────────────────────── JobLauncher, an actor without CPUs: chorosrun's part

Ray places, chorosrun's engine trains. A rank is tied to one actor: it asks the executor for it, connects to it, and
ends at once when that actor ends, by whatever: so an actor that dies is a rank that is lost. Modules of ranks do not
import Ray, nor does ``import choros``.
"""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import of typing
if TYPE_CHECKING:
    from choros.ray.discovery import RayHostDiscovery
    from choros.ray.executor import ElasticRayExecutor, RayExecutor
    from choros.ray.job import RaySettings
    from choros.ray.rank import log
    from choros.ray.worker import RayWorker

__all__ = ["ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "RaySettings", "RayWorker", "log"]

_HOMES = {
    "ElasticRayExecutor": "executor",
    "RayExecutor": "executor",
    "RayHostDiscovery": "discovery",
    "RaySettings": "job",
    "RayWorker": "worker",
    "log": "rank",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'choros.ray' has no attribute {name!r}")
    from importlib import import_module

    try:
        value: object = getattr(import_module(f"choros.ray.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError('choros.ray needs Ray: pip install "choros[ray]"', name="ray") from error
    globals()[name] = value
    return value
