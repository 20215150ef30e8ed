"""Batches of a ``keras.utils.PyDataset``. Imports Keras: ``kinds.py`` imports it on demand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar, final

import keras

from choros.errors import ConfigError
from choros.parallel.data.epochs import EpochData, FixedData, IndexedData
from choros.parallel.data.kind import DataKind
from choros.parallel.data.order import shuffled_batch
from choros.parallel.data.part import Part, check_global_batch, count_rows, note_rows
from choros.parallel.data.parts_dataset import PartsDataset
from choros.parallel.data.shard_batches import ShardBatches
from choros.parallel.data.sharding import Sharding

__all__ = ["KIND", "PyDatasetEpochs", "PyDatasetKind", "PyDatasetPart"]


@final
class PyDatasetKind(DataKind):
    """``keras.utils.PyDataset``: its batches are the global ones, and each process produces all of each.

    What is shuffled is the order of its batches, as in Keras; but the last one stays the last.
    """

    shuffles: ClassVar[bool] = True
    has_batches: ClassVar[bool] = True

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a ``PyDataset`` of the process's rows."""
        batch_size, first = sharding.batch_size, data[0]
        own = count_rows(first)
        note_rows(first)
        if batch_size not in (None, own):
            raise ConfigError(
                f"the PyDataset's batches have {own} examples, but batch_size={batch_size}. Its batches are the global "
                "ones: give it that batch size, or remove batch_size."
            )
        check_global_batch(own, sharding.part.count)
        return PyDatasetPart(data, sharding)

    def split(self, data: Any, part: Part) -> Any:
        """Returns a ``PyDataset`` of the process's rows."""
        return self.shard(data, Sharding(part))

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of the data set, if it has an end."""
        if data.num_batches is None:
            doubt = "a PyDataset without a number of batches has no epochs."
            return FixedData(sharding, lambda: self.split(data, sharding.part), doubt)
        self.split(data, sharding.part)  # the same errors
        return PyDatasetEpochs(data, sharding)

    def batches(self, data: Any) -> Iterator[Any]:
        """Yields the batches by index, with the calls of its methods for the beginning and the end of an epoch."""
        data.on_epoch_begin()
        for index in itertools.count() if data.num_batches is None else range(data.num_batches):
            yield data[index]
        data.on_epoch_end()

    def length(self, data: Any) -> int | None:
        """Returns the number of batches; ``None`` for an infinite data set."""
        number: int | None = data.num_batches
        return number

    def batch_rows(self, data: Any) -> int | None:
        """Returns the number of rows of the first batch."""
        return count_rows(data[0])


@final
class PyDatasetPart(keras.utils.PyDataset):
    """The process's rows of each batch of another ``PyDataset``, without the last one if it has none in it.

    Args:
        inner: the data set of global batches.
        sharding: the process's part, and the order of the batches.
    """

    def __init__(self, inner: Any, sharding: Sharding) -> None:
        super().__init__(
            workers=inner.workers, use_multiprocessing=inner.use_multiprocessing, max_queue_size=inner.max_queue_size
        )
        self._inner = inner
        self._part = part = sharding.part
        self._sharding, self._epoch = sharding, sharding.epoch
        batches: int | None = inner.num_batches
        if batches and count_rows(part.of(inner[batches - 1])) == 0:
            batches -= 1
        self._batches = batches

    @property
    def num_batches(self) -> int | None:
        """The number of batches; ``None`` for an infinite data set."""
        return self._batches

    def __len__(self) -> int:
        return self._batches or 0

    def __getitem__(self, index: int) -> Any:
        number = self._inner.num_batches
        if self._sharding.shuffle and number is not None:
            index = shuffled_batch(index, number, self._sharding.seed, self._epoch)
        return self._part.of(self._inner[index])

    def on_epoch_begin(self) -> None:
        """Calls the inner data set's method."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Calls the inner data set's method, and draws a new order, the same on all processes."""
        self._inner.on_epoch_end()
        self._epoch += 1


@final
class PyDatasetEpochs(IndexedData):
    """The epochs of a ``PyDataset``, whose methods for the beginning and the end of an epoch are called once each.

    Args:
        inner: the data set of global batches.
        sharding: the shard of this process in the first epoch.
    """

    def __init__(self, inner: Any, sharding: Sharding) -> None:
        super().__init__(sharding)
        self._inner = inner
        self._shuffles = sharding.shuffle
        self._ended = 0

    @cached_property
    def data(self) -> Any:
        """A ``PyDataset``."""
        inner = self._inner
        return PartsDataset(self, inner.num_batches, inner.workers, inner.max_queue_size)

    def begin_epoch(self, epoch: int, parts: Iterable[ShardBatches]) -> None:
        """Ends the epochs before this one; not at their own end, as their batches may be read again until now."""
        super().begin_epoch(epoch, parts)
        for _ in range(epoch - self._ended):
            self._inner.on_epoch_end()
        self._ended = max(epoch, self._ended)
        self._inner.on_epoch_begin()

    def rows(self, part: Part, index: int, epoch: int) -> Any:
        """Returns rows of a batch."""
        if self._shuffles:
            index = shuffled_batch(index, self._inner.num_batches, self.seed, epoch)
        return part.of(self._inner[index])

    def _count(self, epoch: int) -> tuple[int, int, int]:
        number = self._inner.num_batches
        full, last = (count_rows(self._inner[index]) if number else 0 for index in (0, number - 1))
        return number, full, last


KIND = PyDatasetKind()
