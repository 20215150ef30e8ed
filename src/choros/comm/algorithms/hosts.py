"""The ranks of each host, and the slice of a buffer that each of them owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from choros.topology import shard_range

__all__ = ["HostRanks"]


@dataclass(frozen=True)
class HostRanks:
    """The number of ranks of each host.

    Buffers are cut into as many slices as the smallest host has ranks: an owner for each slice on every host.

    Attributes:
        sizes: the number of ranks of each host.
    """

    sizes: tuple[int, ...]

    @property
    def slices(self) -> int:
        """The number of slices of a buffer."""
        return min(self.sizes)

    @property
    def shared(self) -> bool:
        """Whether any two ranks share a host."""
        return max(self.sizes) > 1

    @classmethod
    def of(cls, leaders: Sequence[int]) -> HostRanks:
        """Counts the ranks of each host, given one number per rank that only ranks of one host share.

        Example:
            >>> HostRanks.of([0, 0, 2, 2, 2])
            HostRanks(sizes=(2, 3))
        """
        return cls(tuple(list(leaders).count(leader) for leader in dict.fromkeys(leaders)))

    def slice_of(self, local_rank: int, items: int) -> tuple[int, int]:
        """The first item of the slice that a rank owns, and the one after its last.

        Example:
            >>> ranks = HostRanks((3, 2))
            >>> [ranks.slice_of(rank, 7) for rank in range(3)]
            [(0, 4), (4, 7), (7, 7)]
        """
        if local_rank >= self.slices:
            return items, items
        return shard_range(items, local_rank, self.slices)
