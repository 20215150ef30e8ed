"""``RayExecutor`` and its settings."""

from collections import defaultdict

from choros.ray import RayExecutor
from choros.ray import RaySettings as MiniSettings

__all__ = ["Coordinator", "MiniSettings", "RayExecutor"]


class Coordinator:
    """Numbers ranks on nodes. Here only for scripts: mpirun numbers the ranks of choros."""

    def __init__(self, settings: MiniSettings) -> None:
        self.settings = settings
        self.node_id_by_rank: dict[str, list[int]] = defaultdict(list)
        self.hostnames: set[str] = set()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.node_id_by_rank.values()))

    @property
    def node_id_string(self) -> str:
        """The nodes with their numbers of ranks."""
        return ",".join(f"{node}:{len(ranks)}" for node, ranks in self.node_id_by_rank.items())

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Adds a rank."""
        self.hostnames.add(hostname)
        self.node_id_by_rank[node_id].append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Returns each rank's numbers, by Horovod's names of them."""
        nodes = list(self.node_id_by_rank.values())
        found = {}
        for number, ranks in enumerate(nodes):
            for local, rank in enumerate(ranks):
                having = [index for index, others in enumerate(nodes) if len(others) > local]
                found[rank] = {
                    "HOROVOD_CROSS_RANK": having.index(number),
                    "HOROVOD_CROSS_SIZE": len(having),
                    "HOROVOD_LOCAL_RANK": local,
                    "HOROVOD_LOCAL_SIZE": len(ranks),
                }
        return found
