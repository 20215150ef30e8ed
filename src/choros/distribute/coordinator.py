"""``tf.distribute.coordinator``: functions of one's own, which the chief schedules on workers."""

from choros.parameter_server.cluster_coordinator import ClusterCoordinator
from choros.parameter_server.remote_value import PerWorkerDataset, PerWorkerValues, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerValues", "RemoteValue"]
