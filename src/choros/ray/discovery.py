"""Which nodes of Ray's an elastic job may use, and how many ranks each has room for."""

from collections.abc import Iterable, Mapping
from typing import Any

from choros import durations

#: How many seconds pass between two looks; Horovod's name.
DISCOVER_HOSTS_FREQUENCY_SECS: float = durations.RAY_LOOK


class RayHostDiscovery:
    """All nodes of the cluster, with room for as many ranks as their resources allow if nothing else uses them."""

    def __init__(self, use_gpu: bool = False, cpus_per_worker: float = 1, gpus_per_worker: float | None = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns how many ranks each node has room for."""
        import ray

        needs = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker if self.use_gpu else 0}
        return rooms(ray.nodes(), needs)


def rooms(nodes: Iterable[Mapping[str, Any]], needs: Mapping[str, float]) -> dict[str, int]:
    """Returns for how many workers, which need ``needs``, each of Ray's ``nodes`` has room; only those that have any.

    >>> nodes = [{"alive": True, "NodeManagerAddress": "a", "Resources": {"CPU": 4, "GPU": 2}}]
    >>> [rooms(nodes, {"CPU": cpus, "GPU": gpus}) for cpus, gpus in ((1, 0), (1, 1), (8, 0), (0.2, 0))]
    [{'a': 4}, {'a': 2}, {}, {'a': 20}]
    """
    found: dict[str, int] = {}
    for node in nodes:
        if node.get("alive", node.get("Alive")):
            has = node["Resources"]
            slots = min(int(has.get(name, 0) / need + 1e-9) for name, need in needs.items() if need)
            found[node["NodeManagerAddress"]] = found.get(node["NodeManagerAddress"], 0) + slots
    return {host: slots for host, slots in found.items() if slots}


def wanted(hosts: Mapping[str, int], present: Mapping[str, int], most: int | None) -> dict[str, int]:
    """Returns how many actors each host is to have, ``most`` in all; those that are ``present`` come first.

    >>> wanted({"a": 2, "b": 2}, {"b": 1}, most=3)
    {'b': 1, 'a': 2}
    """
    left = sum(hosts.values()) if most is None else most
    chosen: dict[str, int] = {}
    for limits in (present, hosts):
        for host in hosts:
            more = max(0, min(limits.get(host, 0), hosts[host]) - chosen.get(host, 0))
            chosen[host] = chosen.get(host, 0) + min(more, left)
            left -= min(more, left)
    return dict(
        sorted(((host, count) for host, count in chosen.items() if count), key=lambda each: -present.get(each[0], 0))
    )
