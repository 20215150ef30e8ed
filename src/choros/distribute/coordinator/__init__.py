"""Functions that run on workers, one after the other on each, without waiting for each other.

::

    schedule ─► queue ─► a thread for each worker ═══════► worker ─► function(*args)
                 ▲  take, when the clocks allow    ◄═══════   result, metrics, or an error
                 └── put back, if the worker is lost
"""

from choros.distribute.coordinator.cluster_coordinator import ClusterCoordinator
from choros.distribute.coordinator.remote_value import PerWorkerDataset, PerWorkerValues, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerValues", "RemoteValue"]
