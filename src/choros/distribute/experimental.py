"""``tf.distribute.experimental``: experimental classes, and older names of stable ones."""

from __future__ import annotations

from typing import Any

from choros.distribute import coordinator, partitioners
from choros.distribute.central_storage import CentralStorageStrategy
from choros.distribute.communication import CommunicationImplementation, CommunicationOptions
from choros.distribute.input_context import ValueContext
from choros.distribute.multi_worker import MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy
from choros.distribute.parameter_server import ParameterServerStrategy
from choros.distribute.preemption import KerasCheckpoint, PreemptionCheckpointHandler, TerminationConfig
from choros.distribute.tpu import TPUStrategy

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
