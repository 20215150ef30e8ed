"""Batches of arrays in memory, as a ``keras.utils.PyDataset``. The module imports Keras: import it on demand."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any, final

import keras

from choros.parallel.data.epochs import IndexedData
from choros.parallel.data.order import order_of
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

    of_arrays = True

    def __init__(self, data: Any, batch_size: int, sharding: Sharding) -> None:
        super().__init__()
        part = sharding.part
        self._data = data
        self._n = count_rows(data)
        self._ranges = batch_ranges(self._n, batch_size, part.first, part.count)
        self._shuffle = sharding.shuffle
        self._seed = sharding.seed
        self._epoch = sharding.epoch
        self._is_read = False
        self._split = part.count > 1
        self._last: int | None = None

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> Any:
        self._check_order(index)
        self._is_read = self._is_read or index == len(self) - 1
        start, end = self._ranges[index]
        if not self._shuffle:
            return cut(self._data, start, end)
        indices = order_of(self._n, self._seed, self._epoch)[start:end]
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
        """The next order, the same on all ranks, follows if the batches were read to the end.

        Keras calls this before the first epoch, too, and with ``steps_per_epoch`` when some are still to be read.
        """
        if self._is_read:
            self._epoch, self._is_read = self._epoch + 1, False


@final
class ArrayEpochs(IndexedData):
    """The epochs of arrays in memory.

    Args:
        data: arrays of one length, or tuples, lists and dicts of them.
        batch_size: the number of examples in a global batch.
        sharding: the order of examples.
    """

    of_arrays = True

    def __init__(self, data: Any, batch_size: int, sharding: Sharding) -> None:
        super().__init__(sharding)
        self._data = data
        self._n = count_rows(data)
        self._batch_size = batch_size
        self._shuffle = sharding.shuffle
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
        indices = order_of(self._n, self.seed, epoch)[start:end]
        return map_structure(lambda leaf: leaf[indices], self._data)

    def _count(self, epoch: int) -> tuple[int, int, int]:
        size = self._batch_size
        return -(-self._n // size), min(size, self._n), (self._n - 1) % size + 1
