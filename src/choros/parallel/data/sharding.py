"""How a data set is sharded."""

from __future__ import annotations

from dataclasses import dataclass

from choros.parallel.data.part import Part

__all__ = ["Sharding"]


@dataclass(frozen=True)
class Sharding:
    """How ``choros.keras.shard`` shards a data set.

    Attributes:
        part: the process's part of each global batch.
        batch_size: the number of examples in a global batch; ``None`` if not given.
        shuffle: whether examples, or the batches of a ``PyDataset``, come in a new order each epoch, the same on all
            processes.
        seed: the seed of that order, and of samplers without a generator.
        epoch: the epoch whose order comes first.
    """

    part: Part
    batch_size: int | None = None
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
