"""What says where an elastic job may run: ``settings.discovery`` of Ray's executors."""

from typing import Protocol

__all__ = ["HostDiscovery"]


class HostDiscovery(Protocol):
    """The interface; any object with this method is one."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns how many ranks each host may have now, by Ray's names of the nodes."""
