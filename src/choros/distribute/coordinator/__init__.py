"""The coordinator: schedules functions on workers, which run them asynchronously, one at a time each.

::

    schedule ─► queue ─► one thread per worker    ═══════► worker ─► function(*args)
                 ▲  take, when the clocks allow    ◄═══════   result, metrics, or an error
                 └── put back, if the worker is lost
"""

from choros.distribute.coordinator.cluster_coordinator import ClusterCoordinator
from choros.distribute.coordinator.remote_value import PerWorkerDataset, PerWorkerValues, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerValues", "RemoteValue"]
