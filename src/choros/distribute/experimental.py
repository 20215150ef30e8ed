"""``tf.distribute.experimental``: experimental classes, and older names of stable ones."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from choros.distribute.checkpoints import KerasCheckpoint
from choros.distribute.preemption import PreemptionCheckpointHandler, TerminationConfig
from choros.distribute.strategies import CentralStorageStrategy, TPUStrategy
from choros.distribute.strategies import MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy
from choros.distribute.types import CommunicationImplementation, CommunicationOptions, ValueContext

if TYPE_CHECKING:
    from choros.distribute import coordinator, partitioners
    from choros.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "KerasCheckpoint",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]

CollectiveCommunication = CommunicationImplementation


def MultiWorkerMirroredStrategy(
    communication: Any = CommunicationImplementation.AUTO, cluster_resolver: Any = None
) -> _MultiWorkerMirroredStrategy:
    """Creates a ``MultiWorkerMirroredStrategy``; the older name.

    Args:
        communication: has no effect; the engine decides how values are sent.
        cluster_resolver: as for the strategy itself.
    """
    return _MultiWorkerMirroredStrategy(cluster_resolver, communication)


def __getattr__(name: str) -> object:
    """Imports what is asked for of parameter servers: other programs never load them."""
    if name in ("ParameterServerStrategy", "coordinator", "partitioners"):
        return getattr(import_module("choros.distribute"), name)
    raise AttributeError(f"module 'choros.distribute.experimental' has no attribute {name!r}")
