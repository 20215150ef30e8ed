"""Epochs of a data set of which any rank can read any shard from any batch on: for training that ranks leave and join.

::

    epochs = epochs_of(data, sharding)                    kinds.py
      .begin_epoch(3, parts)                              before each epoch: the batches that this rank trains on
      .data          ─► Keras' fit                        yields those batches; of the same kind as the data set
      .batches(parts, 3)                                  at its end: what others have left over, read again

The order of an epoch depends on its number alone, not on what was read before: a rank that joins later reads the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from choros.parallel.data.part import Part, count_rows, without_last_empty
from choros.parallel.data.shard_batches import OPEN, Length, ShardBatches
from choros.parallel.data.sharding import Sharding

__all__ = ["EpochData", "FixedData", "IndexedData", "StreamData", "counted"]


class EpochData(ABC):
    """The epochs of one data set.

    Args:
        sharding: the shard of this process in the first epoch, and the order of examples.

    Attributes:
        doubt: why not every sample is used exactly once if a rank is lost: a sentence; ``None`` if it is.
        epoch: the epoch.
        parts: the batches on which this process trains in it.
        seed: that of the order of examples, where the data do not determine it; the same on all ranks.
        begins_anywhere: whether batches are found, and counted, without reading those before.
        goes_on: whether the next epoch is read from the last iteration of ``data``, and not from a new one.
    """

    doubt: str | None = None
    begins_anywhere = True
    goes_on = False

    def __init__(self, sharding: Sharding) -> None:
        part = sharding.part
        self._local = part.local
        self.epoch, self.seed = sharding.epoch, sharding.seed
        self.parts: tuple[ShardBatches, ...] = (
            ShardBatches(part.first // part.local, part.count // part.local, range(OPEN)),
        )
        self._counted: tuple[int, tuple[int, int, int]] | None = None

    @property
    @abstractmethod
    def data(self) -> Any:
        """A data set that Keras' ``fit`` takes: each iteration yields the batches of ``parts``."""

    def begin_epoch(self, epoch: int, parts: Iterable[ShardBatches]) -> None:
        """Sets what the next iteration of ``data`` yields.

        If the number of batches is not known before they are read, as always with Grain, Keras takes that of its first
        epoch that has any for the number of all later ones: that one must not begin in the middle.

        Args:
            epoch: the epoch.
            parts: the batches on which this process trains in it, in order; empty if it trains on none.
        """
        self.epoch, self.parts = epoch, tuple(parts)

    @abstractmethod
    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts``, one batch of one shard after the other.

        Args:
            parts: batches of any shards; those that do not exist are left out.
            epoch: the epoch; the current one.
        """

    @abstractmethod
    def _count(self, epoch: int) -> tuple[int, int, int]:
        """Returns the number of global batches of an epoch, the rows of a full one, and those of the last one."""

    @property
    def number_of_batches(self) -> int | None:
        """The number of global batches of the current epoch, ``OPEN`` if they do not end; ``None``: it is not known."""
        return self.length(self.epoch)(0, 1)

    def length(self, epoch: int) -> Length:
        """Returns the function that returns the number of batches in which shard ``k`` of ``n`` has rows.

        Data whose number of batches is not known are read once; they must have an end. No rank waits for others.
        """
        if self._counted is None or self._counted[0] != epoch:
            self._counted = epoch, self._count(epoch)
        number, full, last = self._counted[1]

        def length(shard: int, shards: int) -> int:
            part = ShardBatches(shard, shards, range(0)).part(self._local)
            if part.has_rows_of(last):
                return number
            return max(0, number - 1) if part.has_rows_of(full) else 0

        return length


def counted(rows: Iterable[int]) -> tuple[int, int, int]:
    """Returns the number of batches, the rows of a full one, and of the last one, from the numbers of their rows.

    Example:
        >>> counted([4, 4, 3]), counted([])
        ((3, 4, 3), (0, 0, 0))
    """
    number, full, last = 0, 0, 0
    for number, last in enumerate(rows, 1):  # noqa: B007  (their last values are the result)
        full = max(full, last)
    return number, full, last


class IndexedData(EpochData):
    """Data whose batches are found by index."""

    #: Whether they are arrays, whose rows Keras hands to a step in another form than those of a data set.
    of_arrays = False
    #: The current ``parts``, their epoch, and those of them that exist.
    _own: tuple[tuple[ShardBatches, ...], int, list[ShardBatches]] | None = None

    @abstractmethod
    def rows(self, part: Part, index: int, epoch: int) -> Any:
        """Returns the rows of ``part`` in batch ``index`` of an epoch."""

    def closed(self, parts: Iterable[ShardBatches], epoch: int) -> list[ShardBatches]:
        """Returns those of ``parts`` that exist."""
        length = self.length(epoch)
        return [part.closed(length) for part in parts]

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts``."""
        for each in self.closed(parts, epoch):
            for index in each.batches:
                yield self.rows(each.part(self._local), index, epoch)

    def number(self) -> int:
        """Returns how many batches the current ``parts`` have."""
        return sum(len(each.batches) for each in self._current())

    def at(self, position: int) -> Any:
        """Returns batch ``position`` of the current ``parts``."""
        for each in self._current():
            if position < len(each.batches):
                return self.rows(each.part(self._local), each.batches[position], self.epoch)
            position -= len(each.batches)
        raise IndexError(position)

    def _current(self) -> list[ShardBatches]:
        """Returns those of the current ``parts`` that exist; other threads may read the last epoch's."""
        own, parts, epoch = self._own, self.parts, self.epoch
        if own is None or own[0] is not parts or own[1] != epoch:
            own = self._own = parts, epoch, self.closed(parts, epoch)
        return own[2]


class StreamData(EpochData):
    """Data that are read in sequence; what was read before is read again."""

    begins_anywhere = False

    @property
    def number_of_batches(self) -> int | None:
        """Not known before they are read."""
        return None

    @abstractmethod
    def _global_batches(self, epoch: int) -> Iterator[Any]:
        """Yields the global batches of an epoch."""

    def _rows(self, part: Part, batch: Any) -> Any:
        return part.of(batch)

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts``; each is one pass over the data."""
        for each in parts:
            rows = self._pass(each, epoch)
            yield from without_last_empty(rows, count_rows) if each.batches.stop == OPEN else rows

    def _pass(self, wanted: ShardBatches, epoch: int) -> Iterator[Any]:
        part = wanted.part(self._local)
        last = wanted.batches[-1] if wanted.batches else -1
        for index, batch in enumerate(self._global_batches(epoch) if wanted.batches else ()):
            if index in wanted.batches:
                yield self._rows(part, batch)
            if index == last:
                return

    def _count(self, epoch: int) -> tuple[int, int, int]:
        return counted(map(count_rows, self._global_batches(epoch)))


@final
class FixedData(EpochData):
    """Data of this process that others cannot read.

    Args:
        sharding: as for ``EpochData``.
        data: returns them.
        doubt: why: a sentence.
    """

    goes_on = True

    def __init__(self, sharding: Sharding, data: Callable[[], Any], doubt: str) -> None:
        super().__init__(sharding)
        self.doubt = doubt
        self._make, self._made = data, None

    @property
    def data(self) -> Any:
        """The process's own data, whatever ``parts`` are."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields nothing."""
        return iter(())

    def _count(self, epoch: int) -> tuple[int, int, int]:
        return 0, 0, 0
