"""Epochs of ``steps_per_epoch`` batches, where the data have more: each goes on where the one before has ended.

::

    data, of 8 batches      0 1 2 3 4 5 6 7   0 1 2 3 4 5 6 7
    steps_per_epoch=5       ─── 0 ─── ─ 1 ─   ─── 2 ─── ─ 3 ─       Keras warns that the data end in epochs 1 and 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, final

from choros.parallel.data.epochs import EpochData, FixedData
from choros.parallel.data.part import Part
from choros.parallel.data.shard_batches import OPEN, Length, ShardBatches
from choros.parallel.data.sharding import Sharding

__all__ = ["StepsOfEpoch", "epochs_of_steps"]


def epochs_of_steps(data: EpochData, steps: int | None, part: Part) -> EpochData:
    """Returns the epochs of ``steps`` batches each of ``data``; ``data`` if these have no more.

    Args:
        data: the data set of ``fit``, in its first epoch.
        steps: the number of global batches of an epoch; ``None`` for all.
        part: that of this process.
    """
    if steps is None or isinstance(data, FixedData):
        return data
    number = data.number_of_batches
    if number is None:
        doubt = "steps_per_epoch is given, and the data's number of batches is not known before they are read."
        return FixedData(Sharding(part, epoch=data.epoch, seed=data.seed), lambda: data.data, doubt)
    return data if number <= steps else StepsOfEpoch(data, steps, number)


@final
class StepsOfEpoch(EpochData):
    """The epochs of ``steps`` batches of a data set.

    Args:
        inner: the data set, in its first epoch.
        steps: the number of global batches of an epoch.
        number: that of the data set; ``OPEN`` if it does not end.
    """

    def __init__(self, inner: EpochData, steps: int, number: int) -> None:
        self._inner, self._steps, self._number = inner, steps, number
        self._first = inner.epoch
        #: What the last iteration of ``data`` yields next.
        self._next: tuple[int, list[ShardBatches]] | None = None
        self.epoch, self.seed, self.parts = inner.epoch, inner.seed, inner.parts
        self.doubt, self.begins_anywhere = inner.doubt, inner.begins_anywhere

    @property
    def data(self) -> Any:
        """That of the data set; Keras takes ``steps`` batches of an epoch that begins at its beginning."""
        return self._inner.data

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
        begun, position = divmod(epoch - self._first, -(-self._number // self._steps))
        return self._first + begun, position * self._steps

    def _shifted(self, parts: Iterable[ShardBatches], first: int) -> list[ShardBatches]:
        steps = self._steps
        return [
            replace(each, batches=range(first + own.start, first + min(own.stop, steps), own.step))
            for each in parts
            for own in [each.batches]
        ]

    def _count(self, epoch: int) -> tuple[int, int, int]:
        raise NotImplementedError  # ``length`` is that of the data set
