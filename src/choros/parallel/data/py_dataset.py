"""Batches of a ``keras.utils.PyDataset``. Imports Keras: ``kinds.py`` imports it on demand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, final

import keras

from choros.errors import ConfigError
from choros.parallel.data.kind import DataKind, Sharding
from choros.parallel.data.part import Part, check_global_batch, count_rows

__all__ = ["KIND", "PyDatasetKind", "PyDatasetPart"]


@final
class PyDatasetKind(DataKind):
    """``keras.utils.PyDataset``: its batches are the global ones, and each process makes all of each."""

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """A ``PyDataset`` of the process's rows."""
        batch_size = sharding.batch_size
        if batch_size is not None and (own := count_rows(data[0])) != batch_size:
            raise ConfigError(
                f"the PyDataset's batches have {own} examples, batch_size={batch_size} asks for others. Its batches "
                "are the global ones: make them that large, or leave batch_size out."
            )
        return PyDatasetPart(data, sharding.part)

    def split(self, data: Any, part: Part) -> Any:
        """A ``PyDataset`` of the process's rows."""
        check_global_batch(count_rows(data[0]), part.count)
        return PyDatasetPart(data, part)

    def batches(self, data: Any) -> Iterator[Any]:
        """By index, with its methods for the begin and the end of an epoch called."""
        data.on_epoch_begin()
        for index in itertools.count() if data.num_batches is None else range(data.num_batches):
            yield data[index]
        data.on_epoch_end()

    def length(self, data: Any) -> int | None:
        """``None`` for a data set without end."""
        number: int | None = data.num_batches
        return number

    def batch_rows(self, data: Any) -> int | None:
        """Those of the first batch."""
        return count_rows(data[0])


@final
class PyDatasetPart(keras.utils.PyDataset):
    """The process's rows of the batches of another ``PyDataset``, without batches in which it has none."""

    def __init__(self, inner: Any, part: Part) -> None:
        super().__init__(
            workers=inner.workers, use_multiprocessing=inner.use_multiprocessing, max_queue_size=inner.max_queue_size
        )
        self._inner = inner
        self._part = part
        batches: int | None = inner.num_batches
        # Only the last batch can be too small to have a row for every rank.
        if batches and count_rows(part.of(inner[batches - 1])) == 0:
            batches -= 1
        self._batches = batches

    @property
    def num_batches(self) -> int | None:
        """Batches in which this rank has rows; ``None`` for a data set without end."""
        return self._batches

    def __len__(self) -> int:
        return self._batches or 0

    def __getitem__(self, index: int) -> Any:
        return self._part.of(self._inner[index])

    def on_epoch_begin(self) -> None:
        """The inner data set's."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """The inner data set's."""
        self._inner.on_epoch_end()


KIND = PyDatasetKind()
