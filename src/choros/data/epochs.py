"""Epochs of which any rank can read any shard from any batch on: for training that ranks leave and join.

The order of an epoch depends on its number alone, not on what was read before: later ranks read the same::

    epochs = kind_of(data).epochs(data, sharding)         kinds.py
      .begin_epoch(3, parts)                              before each epoch: the batches that this rank trains on
      .data          ─► Keras' fit                        yields those batches; of the same kind as the data set
      .batches(parts, 3)                                  at its end: what others have left over, read again
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, final

from choros.data.plan import OPEN, Length, ShardBatches
from choros.data.rows import Part, Sharding, count_rows, without_last_empty


class EpochData(ABC):
    """The epochs of one data set. ``make`` returns what ``fit`` takes, of these epochs.
    ``doubt`` says why not every sample is used exactly once if a rank is lost.
    ``begins_anywhere``: batches are found, and counted, without reading those before. ``goes_on``: the next epoch is
    read from the last iteration of ``data``, not from a new one. ``seed``, a plain value, is the same on all ranks, as
    is ``first``, the epoch at the beginning of the data.
    """

    doubt: str | None = None
    begins_anywhere = True
    goes_on = False

    def __init__(self, sharding: Sharding, make: Callable[[Any], Any]) -> None:
        part = sharding.part
        self._local, self._make = part.local, make
        self.epoch = self.first = sharding.epoch
        self.seed: Any = sharding.seed
        self.parts: tuple[ShardBatches, ...] = (
            ShardBatches(part.first // part.local, part.count // part.local, range(OPEN)),
        )
        self._counted: tuple[int, tuple[int, int, int]] | None = None

    @cached_property
    def data(self) -> Any:
        """A data set that Keras' ``fit`` takes: each iteration yields the batches of ``parts``."""
        return self._make(self)

    def begin_fit(self) -> None:  # noqa: B027  (most data have nothing to do then)
        """All ranks call it before the epochs of an elastic ``fit``: an earlier one may have read the same data."""

    def agree(self) -> None:  # noqa: B027  (most have one order)
        """Gives data of an evaluation, which has begun, the order that they have on the first rank; all call it."""

    def begin_epoch(self, epoch: int, parts: Iterable[ShardBatches]) -> None:
        """Sets what the next iteration of ``data`` yields. Keras takes an unknown number of batches, as always with
        Grain, from its first epoch that has any, for all later ones: that one must not begin in the middle.
        """
        self.epoch, self.parts = epoch, tuple(parts)

    @abstractmethod
    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts`` of any shards, batch after batch; those that do not exist are left out."""

    @abstractmethod
    def _count(self, epoch: int) -> tuple[int, int, int]:
        """Returns the number of global batches of an epoch, the rows of a full one, and those of the last one."""

    @property
    def number_of_batches(self) -> int | None:
        """The number of global batches of the current epoch, ``OPEN`` if they do not end; ``None``: it is not known."""
        return self.length(self.epoch)(0, 1)

    def length(self, epoch: int) -> Length:
        """Returns what counts the batches in which shard ``k`` of ``n`` has rows; if need be, it reads all once."""
        if self._counted is None or self._counted[0] != epoch:
            self._counted = epoch, self._count(epoch)
        counts = self._counted[1]
        return lambda shard, shards: ShardBatches(shard, shards, range(0)).part(self._local).batches_of(*counts)


def counted(rows: Iterable[int]) -> tuple[int, int, int]:
    """Returns the number of batches, the rows of a full one, and of the last one, from the numbers of their rows.

    >>> counted([4, 4, 3]), counted([])
    ((3, 4, 3), (0, 0, 0))
    """
    number, full, last = 0, 0, 0
    for number, last in enumerate(rows, 1):  # noqa: B007  (their last values are the result)
        full = max(full, last)
    return number, full, last


class IndexedData(EpochData):
    """Data of ``total()`` batches; ``rows(part, index, epoch)`` returns rows of one that is found by its index."""

    #: Whether they are arrays, whose rows Keras hands to a step in another form than those of a data set.
    of_arrays = False
    #: The current ``parts``, their epoch, and those of them that exist.
    _own: tuple[tuple[ShardBatches, ...], int, list[ShardBatches]] | None = None

    def __init__(
        self,
        sharding: Sharding,
        make: Callable[[Any], Any],
        total: Callable[[], int],
        rows: Callable[[Part, int, int], Any],
    ) -> None:
        super().__init__(sharding, make)
        self._total, self.rows = total, rows

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts``."""
        for each in self._closed(parts, epoch):
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
            own = self._own = parts, epoch, self._closed(parts, epoch)
        return own[2]

    def _closed(self, parts: Iterable[ShardBatches], epoch: int) -> list[ShardBatches]:
        length = self.length(epoch)
        return [part.closed(length) for part in parts]

    def _count(self, epoch: int) -> tuple[int, int, int]:
        number, everyone = self._total(), Part(0, 1)
        full, last = (count_rows(self.rows(everyone, index, epoch)) if number else 0 for index in (0, number - 1))
        return number, full, last


class StreamData(EpochData):
    """Data whose batches ``read(epoch)`` yields in sequence; what was read before is read again."""

    begins_anywhere = False

    def __init__(self, sharding: Sharding, make: Callable[[Any], Any], read: Callable[[int], Iterable[Any]]) -> None:
        super().__init__(sharding, make)
        self._read = read

    @property
    def number_of_batches(self) -> int | None:
        """Not known before they are read."""
        return None

    def _rows(self, part: Part, batch: Any) -> Any:
        return part.of(batch)

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts``; each is one pass over the data."""
        for each in parts:
            if each.batches:
                rows = map(partial(self._rows, each.part(self._local)), each.taken_from(self._read(epoch)))
                yield from without_last_empty(rows) if each.batches.stop == OPEN else rows

    def _count(self, epoch: int) -> tuple[int, int, int]:
        return counted(map(count_rows, self._read(epoch)))


@final
class FixedData(EpochData):
    """Data of this process that others cannot read; ``doubt`` says why."""

    goes_on = True

    def __init__(self, sharding: Sharding, data: Callable[[], Any], doubt: str) -> None:
        super().__init__(sharding, lambda _: data())
        self.doubt = doubt

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields nothing."""
        return iter(())

    def _count(self, epoch: int) -> tuple[int, int, int]:
        return 0, 0, 0


def epochs_of_steps(data: EpochData, steps: int | None, part: Part) -> EpochData:
    """Returns the epochs of ``steps`` global batches each of ``data``; ``data`` if these have no more."""
    if steps is None or isinstance(data, FixedData):
        return data
    number = data.number_of_batches
    if number is None:
        doubt = "steps_per_epoch is given, and the data's number of batches is not known before they are read."
        return FixedData(Sharding(part, epoch=data.epoch, seed=data.seed), lambda: data.data, doubt)
    return data if number <= steps else StepsOfEpoch(data, steps, number)


@final
class StepsOfEpoch(EpochData):
    """The epochs of ``steps`` global batches of a data set of ``number``, ``OPEN`` if it does not end."""

    def __init__(self, inner: EpochData, steps: int, number: int) -> None:
        self._inner, self._steps, self._number = inner, steps, number
        self._make = lambda _: inner.data  # of which Keras takes ``steps`` batches
        self.first = inner.first
        #: What the last iteration of ``data`` yields next.
        self._next: tuple[int, list[ShardBatches]] | None = None
        self.epoch, self.seed, self.parts = inner.epoch, inner.seed, inner.parts
        self.doubt, self.begins_anywhere = inner.doubt, inner.begins_anywhere

    def begin_fit(self) -> None:
        """As for other data."""
        self._inner.begin_fit()
        self.seed = self._inner.seed

    @property
    def number_of_batches(self) -> int:
        """The number of global batches of the current epoch."""
        return min(self._steps, self._number - self._place(self.epoch)[1])

    def begin_epoch(self, epoch: int, parts: Iterable[ShardBatches]) -> None:
        """Sets what the next iteration of ``data`` yields, if the last one does not go on with it."""
        super().begin_epoch(epoch, parts)
        inner, first = self._place(epoch)
        if self.parts and self.parts[0].batches == range(OPEN):
            wanted = [replace(each, batches=range(first, OPEN)) for each in self.parts]
            following = [replace(each, batches=range(first + self._steps, OPEN)) for each in self.parts]
        else:
            wanted, following = self._shifted(self.parts, first), []
        self.goes_on = self._next == (inner, wanted)
        if not self.goes_on:
            self._inner.begin_epoch(inner, wanted)
        self._next = (inner, following) if following else None

    def batches(self, parts: Iterable[ShardBatches], epoch: int) -> Iterator[Any]:
        """Yields the rows of ``parts``."""
        self._next = None  # a shuffling stream has drawn other seeds
        inner, first = self._place(epoch)
        return self._inner.batches(self._shifted(parts, first), inner)

    def length(self, epoch: int) -> Length:
        """As for other data; at most the steps."""
        inner, first = self._place(epoch)
        own = self._inner.length(inner)
        return lambda shard, shards: min(self._steps, max(0, own(shard, shards) - first))

    def _place(self, epoch: int) -> tuple[int, int]:
        """Returns the data set's epoch in which an epoch is, and its first batch there."""
        self._inner.seed = self.seed  # which a commit, or other ranks, may have set
        begun, position = divmod(epoch - self.first, -(-self._number // self._steps))
        return self.first + begun, position * self._steps

    def _shifted(self, parts: Iterable[ShardBatches], first: int) -> list[ShardBatches]:
        steps = self._steps
        return [
            replace(each, batches=range(first + own.start, first + min(own.stop, steps), own.step))
            for each in parts
            for own in [each.batches]
        ]

    def _count(self, epoch: int) -> tuple[int, int, int]:
        raise NotImplementedError  # ``length`` is that of the data set
