"""Batches of arrays in memory, as a ``keras.utils.PyDataset``. The module imports Keras: import it on demand."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any, final

import keras
import numpy as np

from choros.parallel.data.epochs import IndexedData
from choros.parallel.data.part import Part, count_rows, cut
from choros.parallel.data.parts_dataset import PartsDataset
from choros.parallel.data.shard import batch_ranges, check_batch_size
from choros.parallel.data.sharding import Sharding
from choros.parallel.structure import map_structure

__all__ = ["ArrayBatches", "ArrayEpochs"]


@final
class ArrayBatches(keras.utils.PyDataset):
    """This process's part of each global batch of arrays in memory.

    Args:
        data: arrays of one length, or tuples, lists and dicts of them.
        batch_size: the number of examples in a global batch.
        sharding: the process's part, and the order of examples.
    """

    def __init__(self, data: Any, batch_size: int, sharding: Sharding) -> None:
        super().__init__()
        part = sharding.part
        self._data = data
        self._n = count_rows(data)
        self._ranges = batch_ranges(self._n, batch_size, part.first, part.count)
        self._shuffle = sharding.shuffle
        self._seed = sharding.seed
        self._epoch = sharding.epoch
        self._order = self._draw()
        self._split = part.count > 1
        self._last: int | None = None

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> Any:
        self._check_order(index)
        start, end = self._ranges[index]
        if self._order is None:
            return cut(self._data, start, end)
        indices = self._order[start:end]
        return map_structure(lambda leaf: leaf[indices], self._data)

    def _check_order(self, index: int) -> None:
        """Warns if Keras shuffles batches: there is no public flag, but the requested indices show it."""
        if self._split and self._last is not None and index not in (0, self._last + 1):
            self._split = False
            warnings.warn(
                "Keras reorders these batches on each rank independently, so that a step mixes shards of different "
                "global batches: pass shuffle=False to fit, and shuffle=True to shard for a new order each epoch.",
                stacklevel=2,
            )
        self._last = index

    def on_epoch_end(self) -> None:
        """Draws a new order, the same on all ranks."""
        self._epoch += 1
        self._order = self._draw()

    def _draw(self) -> Any:
        return _order(self._n, self._seed, self._epoch) if self._shuffle else None


@final
class ArrayEpochs(IndexedData):
    """The epochs of arrays in memory.

    Args:
        data: arrays of one length, or tuples, lists and dicts of them.
        batch_size: the number of examples in a global batch.
        sharding: the order of examples.
    """

    def __init__(self, data: Any, batch_size: int, sharding: Sharding) -> None:
        super().__init__(sharding)
        self._data = data
        self._n = count_rows(data)
        self._batch_size = batch_size
        self._shuffle = sharding.shuffle
        self._drawn: tuple[tuple[int, int], Any] | None = None
        check_batch_size(batch_size, sharding.part.count)

    @cached_property
    def data(self) -> Any:
        """A ``PyDataset``."""
        return PartsDataset(self, -(-self._n // self._batch_size))

    def rows(self, part: Part, index: int, epoch: int) -> Any:
        """Returns rows of the arrays."""
        first = index * self._batch_size
        start, end = (first + row for row in part.range(min(self._batch_size, self._n - first)))
        if not self._shuffle:
            return cut(self._data, start, end)
        which = self.seed, epoch
        if self._drawn is None or self._drawn[0] != which:
            # Keras ends an epoch before the first one, and ``ArrayBatches`` has then drawn its second order.
            self._drawn = which, _order(self._n, self.seed, epoch + 1)
        indices = self._drawn[1][start:end]
        return map_structure(lambda leaf: leaf[indices], self._data)

    def _count(self, epoch: int) -> tuple[int, int, int]:
        size = self._batch_size
        return -(-self._n // size), min(size, self._n), (self._n - 1) % size + 1


def _order(n: int, seed: int, epoch: int) -> Any:
    return np.random.default_rng((seed, epoch)).permutation(n)
