"""The batches of changing shards as a ``keras.utils.PyDataset``. The module imports Keras: import it on demand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import keras

from choros.parallel.data.epochs import IndexedData
from choros.parallel.data.part import Part

__all__ = ["PartsDataset"]


@final
class PartsDataset(keras.utils.PyDataset):
    """The batches of this process, which each epoch of ``source`` determines.

    Threads of its own read ahead: Keras' workers may keep batches of one epoch for the next.

    Args:
        source: the data.
        longest: the number of global batches. Keras asks for the number of batches before epochs; an epoch may have
            fewer, but not more.
        workers: the number of threads that read; with one, batches are read when Keras asks for them.
        ahead: the number of batches that they may read before.
    """

    def __init__(self, source: IndexedData, longest: int, workers: int = 1, ahead: int = 0) -> None:
        super().__init__()
        self.of_arrays = source.of_arrays
        self._source = source
        self._longest = longest
        self._readers = ThreadPoolExecutor(workers) if workers > 1 else None
        self._ahead = ahead
        self._read: dict[int, Future[Any]] = {}
        self._parts = source.parts
        self._begins = False

    def on_epoch_begin(self) -> None:
        """Next, Keras asks for the number of batches that it reads in this epoch."""
        self._begins = True

    @property
    def num_batches(self) -> int:
        """The number of batches in the epoch that begins; else the largest possible."""
        return self._source.number() if self._begins else self._longest

    def __len__(self) -> int:
        return self._source.number()

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        self._begins = False
        if index >= len(self):  # this process has fewer batches, or none, and Keras builds the model from one
            return self._source.rows(Part(0, 1), index, self._source.epoch)
        if self._readers is None:
            return self._source.at(index)
        if index == 0 or self._parts is not self._source.parts:
            for each in self._read.values():
                each.cancel()
            self._read, self._parts = {}, self._source.parts
        for later in range(index, min(index + 1 + self._ahead, self._source.number())):
            if later not in self._read:
                self._read[later] = self._readers.submit(self._source.at, later)
        return self._read.pop(index).result()
