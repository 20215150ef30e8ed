"""The topology of a job: a rank's position among all ranks and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from choros.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """A rank's position in the job, in Horovod's terms; ``launcher`` is for messages. Four ranks on two hosts::

        host a          host b
        rank 0  rank 1  rank 2  rank 3
        local 0 local 1 local 0 local 1      local_rank: rank on the host; local_size: ranks on the host
        cross 0 cross 0 cross 1 cross 1      cross_rank: index of the host among hosts with this local_rank

    ``is_homogeneous``: all hosts have the same number of processes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True
    launcher: str = "alone"

    @classmethod
    def from_hosts(cls, hosts: Sequence[str], rank: int, *, launcher: str = "alone") -> Topology:
        """Returns the topology of ``rank`` when rank ``i`` runs on ``hosts[i]``.

        >>> topology = Topology.from_hosts(["a", "a", "b"], rank=2)
        >>> (topology.local_rank, topology.local_size, topology.cross_rank, topology.cross_size)
        (0, 1, 1, 2)
        >>> topology.is_homogeneous
        False
        """
        local_ranks = [hosts[:i].count(host) for i, host in enumerate(hosts)]
        peers = [i for i, local in enumerate(local_ranks) if local == local_ranks[rank]]
        return cls(
            rank=rank,
            size=len(hosts),
            local_rank=local_ranks[rank],
            local_size=hosts.count(hosts[rank]),
            cross_rank=peers.index(rank),
            cross_size=len(peers),
            is_homogeneous=len({hosts.count(host) for host in hosts}) == 1,
            launcher=launcher,
        )


def shard_range(n: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the index range of ``rank`` among ``n`` elements; the first ``n % size`` ranks get one more.

    The ranges of all ranks are disjoint, in order, and together cover ``0 … n - 1``.

    Args:
        n: the number of elements, 0 or more.
        rank: the rank, ``0 … size - 1``.
        size: the number of ranks.

    Returns:
        ``(start, end)``, ``end`` excluded; empty for the last ranks if there are fewer elements than ranks.

    Raises:
        ConfigError: ``n`` is negative, or ``rank`` is not in ``0 … size - 1``, or one is no whole number.

    Example:
        >>> [shard_range(10, rank, 4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if not all(isinstance(each, Integral) for each in (n, rank, size)) or n < 0 or not 0 <= rank < size:
        expected = "expected whole numbers, n >= 0 and 0 <= rank < size"
        raise ConfigError(f"shard_range(n={n}, rank={rank}, size={size}): {expected}.")
    share, remainder = divmod(n, size)
    start = rank * share + min(rank, remainder)
    return start, start + share + (rank < remainder)
