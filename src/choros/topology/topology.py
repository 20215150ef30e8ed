"""The topology of a job: a rank's position among all ranks and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """A rank's position in the job, in Horovod's terms.

    Four ranks on two hosts::

        host a          host b
        rank 0  rank 1  rank 2  rank 3
        local 0 local 1 local 0 local 1      local_rank: rank on the host; local_size: ranks on the host
        cross 0 cross 0 cross 1 cross 1      cross_rank: index of the host among hosts with this local_rank

    Attributes:
        rank: the rank of this process, ``0 … size - 1``.
        size: the number of processes in the job.
        local_rank: the rank of this process among those on its host.
        local_size: the number of processes on this host.
        cross_rank: the index of this host among the hosts that have a process with this ``local_rank``.
        cross_size: the number of these hosts.
        is_homogeneous: whether all hosts have the same number of processes.
        launcher: the launcher that started the process, for messages.
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

        Example:
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
