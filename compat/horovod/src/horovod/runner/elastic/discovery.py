"""What says where an elastic job may run: ``settings.discovery`` of Ray's executors."""

from choros.ray.discovery import HostDiscovery

__all__ = ["HostDiscovery"]
