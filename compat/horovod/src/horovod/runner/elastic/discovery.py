"""What says where an elastic job may run: ``settings.discovery`` of Ray's executors."""

__all__ = ["HostDiscovery"]


class HostDiscovery:
    """The interface; any object that has its method will do."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns how many ranks each host may have now, by Ray's names of the nodes."""
        raise NotImplementedError
