"""Where a rank stands among all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """A rank's place in the job, in Horovod's words.

    Four ranks on two hosts::

        host a          host b
        rank 0  rank 1  rank 2  rank 3
        local 0 local 1 local 0 local 1      local_rank: place on the host; local_size: ranks on the host
        cross 0 cross 0 cross 1 cross 1      cross_rank: the host's place among hosts that have this local_rank

    Attributes:
        rank: this process, ``0 … size - 1``.
        size: processes in the job.
        local_rank: this process among those on its host.
        local_size: processes on this host.
        cross_rank: this host among the hosts that have a process of this ``local_rank``.
        cross_size: how many hosts have one.
        is_homogeneous: every host has the same number of processes.
        launcher: what started the process, for messages.
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
        """The place of ``rank`` when rank ``i`` runs on ``hosts[i]``.

        Example:
            >>> place = Topology.from_hosts(["a", "a", "b"], rank=2)
            >>> (place.local_rank, place.local_size, place.cross_rank, place.cross_size)
            (0, 1, 1, 2)
            >>> place.is_homogeneous
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
