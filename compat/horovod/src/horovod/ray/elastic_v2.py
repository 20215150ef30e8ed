"""Elastic jobs on Ray, by ``RayExecutor(min_workers=…)``."""

from choros.ray import RayHostDiscovery

__all__ = ["RayHostDiscovery"]
