"""Elastic jobs on Ray, by Horovod's older class."""

from choros.ray import ElasticRayExecutor
from choros.ray import RayHostDiscovery as _RayHostDiscovery

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]


class RayHostDiscovery(_RayHostDiscovery):
    """All nodes of the cluster; its arguments have the names of ``ElasticRayExecutor``'s."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
