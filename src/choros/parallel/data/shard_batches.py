"""Some batches of one shard of an epoch: what a ledger counts, and a data set reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from choros.parallel.data.part import Part

__all__ = ["OPEN", "Length", "ShardBatches"]

#: The end of a range of batches whose number is not known yet.
OPEN = 2**53

#: Returns the number of batches in which shard ``k`` of ``n`` has rows.
Length = Callable[[int, int], int]


@dataclass(frozen=True)
class ShardBatches:
    """Some batches of one shard.

    Attributes:
        shard: the shard.
        shards: the number of shards into which each global batch is divided.
        batches: the indices of the batches in the epoch; up to ``OPEN`` if their number is not known.

    Example:
        >>> ShardBatches(1, 4, range(3, 7)).closed(lambda shard, shards: 5)
        ShardBatches(shard=1, shards=4, batches=range(3, 5))
    """

    shard: int
    shards: int
    batches: range

    def closed(self, length: Length) -> ShardBatches:
        """Returns those batches that exist."""
        stop = min(self.batches.stop, max(self.batches.start, length(self.shard, self.shards)))
        return replace(self, batches=range(self.batches.start, stop, self.batches.step))

    def part(self, local: int = 1) -> Part:
        """Returns the rows of the shard in each global batch, for a process of ``local`` replicas."""
        return Part(self.shard * local, self.shards * local, local)
