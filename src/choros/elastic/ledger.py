"""Which batches of an epoch have been consumed, and which rank consumes the others; the same on every rank.

An epoch begins with as many shards as there are ranks: shard k of n has the rows ``shard_range(rows, k, n)`` of every
global batch. Each rank owns a shard, and all ranks make each step together, so one counter says how far all are::

    step                    0 1 2 3 4 5 6 7
    shard 0   rank 0        x x x x x x x x
    shard 1   rank 1        x x x +               killed in step 3: from there on the shard has no owner
    shard 2   rank 2 → 1    x x x x x x x x       survivors keep their shards, of which they may have prefetched batches
    shard 1   rank 2              . . x x x x     a new rank takes the shard over, here at step 5

    left over               shard 1: batches 3, 4

What is left over at the end of the epoch's batches, before validation, is sharded over the ranks of that moment. If one
is killed then, what it has not done is left over again; and so on, until nothing is left.

A job that is started again with another number of ranks divides the global batches that no rank has begun anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from choros.parallel.data.shard_batches import OPEN, Length, ShardBatches

__all__ = ["Ledger"]


@dataclass(frozen=True)
class _Lot:
    """The batches that one rank consumes, one in each step.

    Attributes:
        parts: the batches, in order.
        owner: the rank; ``None`` since it was lost.
        stopped: the step in which the last owner was lost; ``None`` if there is an owner.
    """

    parts: tuple[ShardBatches, ...]
    owner: int | None
    stopped: int | None = None

    def between(self, start: int, stop: int = OPEN) -> tuple[ShardBatches, ...]:
        """Returns the batches of the steps ``start … stop - 1``."""
        found = []
        for part in self.parts:
            if batches := part.batches[start:stop]:
                found.append(replace(part, batches=batches))
            start, stop = (max(0, each - len(part.batches)) for each in (start, stop))
        return tuple(found)

    def not_consumed(self, steps: int) -> tuple[ShardBatches, ...]:
        """Returns the batches that were not consumed in the first ``steps`` steps."""
        return self.between(steps if self.stopped is None else self.stopped)


@dataclass(frozen=True)
class Ledger:
    """The state of an epoch; each method returns the next one. Create the first with ``of_epoch``.

    Attributes:
        epoch: the epoch.
        steps: the steps that all ranks have made together since the epoch's batches, or those left over, were sharded.
        lots: what the ranks consume, one batch in each step.
        left: batches without an owner, besides those of the lots.
        first: the first global batch of the lots, in the epoch.
        is_tail: whether the lots are what was left over.

    Example:
        >>> def length(shard: int, shards: int) -> int:
        ...     return 4
        >>> ledger = Ledger.of_epoch(0, size=3).stepped(2).lost({0: 0, 2: 1}).stepped(2)
        >>> ledger.shard_of(1), ledger.left_over(length)
        (2, (ShardBatches(shard=1, shards=3, batches=range(2, 4)),))
        >>> tail = ledger.resharded(2, length)
        >>> tail.of_rank(0)
        (ShardBatches(shard=1, shards=3, batches=range(2, 4, 2)),)
        >>> tail.stepped().is_done(length)
        True
    """

    epoch: int
    lots: tuple[_Lot, ...]
    steps: int = 0
    left: tuple[ShardBatches, ...] = ()
    first: int = 0
    is_tail: bool = False

    @classmethod
    def of_epoch(cls, epoch: int, size: int) -> Self:
        """Returns the ledger of the beginning of an epoch: rank k owns shard k.

        Args:
            epoch: the epoch.
            size: the number of ranks.
        """
        return cls(epoch, _shards(0, size))

    def next_epoch(self, size: int) -> Self:
        """Returns the ledger of the beginning of the next epoch."""
        return type(self).of_epoch(self.epoch + 1, size)

    # what happens -----------------------------------------------------------------------------------

    def stepped(self, steps: int = 1) -> Self:
        """All ranks have consumed one more batch of their lots; a rank whose lot has ended stays at its end."""
        return replace(self, steps=self.steps + steps)

    def lost(self, new_ranks: Mapping[int, int], accumulated: int = 0) -> Self:
        """Ranks were lost in the current step, which is not counted by ``steps`` yet: their batch was not consumed.

        Args:
            new_ranks: the new rank of each survivor, by its old one; all other ranks are lost.
            accumulated: how many of the last steps are micro-batches of an update that is not made yet: the lost ranks'
                part of them was not consumed either.
        """
        stopped = max(0, self.steps - accumulated)
        return replace(self, lots=tuple(_after_loss(lot, new_ranks, stopped) for lot in self.lots))

    def taken_back(self, steps: int) -> Self:
        """The last steps were micro-batches of an update that will not be made."""
        return replace(self, steps=max(0, self.steps - steps))

    @property
    def counts(self) -> tuple[int, ...]:
        """The steps, and for each lot the step in which its owner was lost, or -1."""
        return (self.steps, *(-1 if lot.stopped is None else lot.stopped for lot in self.lots))

    def counted(self, counts: Iterable[int]) -> Self:
        """The ledger with these ``counts``: ranks that were at their end have counted fewer steps than others.

        Example:
            >>> ledger = Ledger.of_epoch(0, size=2)
            >>> ahead, at_end = ledger.stepped(9).lost({0: 0}), ledger.stepped(8).lost({0: 0})
            >>> at_end.counts, at_end.counted(map(max, ahead.counts, at_end.counts)) == ahead
            ((8, -1, 8), True)
        """
        steps, *stopped = counts
        lots = zip(self.lots, stopped, strict=True)
        return replace(
            self, steps=steps, lots=tuple(lot if stop < 0 else replace(lot, stopped=stop) for lot, stop in lots)
        )

    def joined(self, rank: int) -> Self:
        """A new rank takes over a lot without an owner from the current step on.

        If all lots have owners, it waits for the end of the epoch, or for what is left over.
        """
        free = next((index for index, lot in enumerate(self.lots) if lot.owner is None), None)
        if free is None:
            return self
        lot = self.lots[free]
        lots = (*self.lots[:free], _Lot(lot.parts, rank), *self.lots[free + 1 :])
        return replace(self, lots=lots, left=(*self.left, *lot.between(lot.stopped or 0, self.steps)))

    def has_place(self, length: Length) -> bool:
        """Whether a new rank can take over a lot now: one has batches left and no owner, and all owners have more.

        Args:
            length: as for ``left_over``.

        Example:
            >>> ledger = Ledger.of_epoch(0, size=2).lost({0: 0})
            >>> ledger.has_place(lambda shard, shards: 4), ledger.stepped(4).has_place(lambda shard, shards: 4)
            (True, False)
        """
        owned, free = set[bool](), set[bool]()
        for lot in self.lots:
            has_more = any(part.closed(length).batches for part in lot.between(self.steps))
            (free if lot.owner is None else owned).add(has_more)
        return not self.is_tail and True in free and False not in owned

    @property
    def lacks_owners(self) -> bool:
        """Whether batches may be left over."""
        return bool(self.left) or any(lot.owner is None for lot in self.lots)

    # what is to be done -----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The next global batch of all ranks, before the tail."""
        return self.first + self.steps

    def shard_of(self, rank: int) -> int | None:
        """The shard that ``rank`` owns, before the tail; ``None`` if it has come late, and owns none."""
        return next((index for index, lot in enumerate(self.lots) if lot.owner == rank), None)

    def of_rank(self, rank: int) -> tuple[ShardBatches, ...]:
        """Returns the batches that ``rank`` is to consume, one in each step, from the current step on."""
        return next((lot.between(self.steps) for lot in self.lots if lot.owner == rank), ())

    def left_over(self, length: Length) -> tuple[ShardBatches, ...]:
        """Returns all batches of the epoch that no rank has consumed.

        Args:
            length: returns the number of batches in which shard ``k`` of ``n`` has rows; the same on every rank.
        """
        parts = (*self.left, *(part for lot in self.lots for part in lot.not_consumed(self.steps)))
        return tuple(part for each in parts if (part := each.closed(length)).batches)

    def is_done(self, length: Length) -> bool:
        """Whether each batch of the epoch has been consumed."""
        return not self.left_over(length)

    def resharded(self, size: int, length: Length) -> Self:
        """All batches that no rank has consumed, sharded over ``size`` ranks: rank r of m has the r-th, (r+m)-th, ….

        If as many shards as ranks have equally many left, each rank has one of them, as before.

        Args:
            size: the number of ranks.
            length: as for ``left_over``.
        """
        parts = self.left_over(length)
        numbers = [len(part.batches) for part in parts]
        if len(parts) == size and max(numbers) - min(numbers) <= 1:
            lots = tuple(_Lot((part,), rank) for rank, part in enumerate(parts))
        else:
            lots = tuple(_Lot(tuple(_every(parts, rank, size)), rank) for rank in range(size))
        return replace(self, lots=lots, steps=0, left=(), first=0, is_tail=True)

    def resumed(self, size: int, length: Length) -> Self:
        """The ledger of a job that goes on with ``size`` ranks from a commit.

        The global batches that no rank has begun are divided into ``size`` shards; batches of which only some shards
        were consumed stay left over for the end of the epoch. So does all that is left of a tail: then the epoch has no
        batches before.

        Args:
            size: the number of ranks.
            length: as for ``left_over``.
        """
        if self.is_tail:
            return replace(self, lots=(), steps=0, left=self.left_over(length))
        stopped = (part for lot in self.lots if lot.owner is None for part in lot.between(lot.stopped or 0, self.steps))
        return replace(
            self, lots=_shards(self.position, size), steps=0, left=(*self.left, *stopped), first=self.position
        )

    # as JSON ----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Returns numbers, lists and dicts, for ``from_json``."""
        lots = [{"owner": lot.owner, "stopped": lot.stopped, "parts": _listed(lot.parts)} for lot in self.lots]
        numbers = {"epoch": self.epoch, "steps": self.steps, "first": self.first, "is_tail": self.is_tail}
        return {**numbers, "lots": lots, "left": _listed(self.left)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the ledger that ``to_json`` has written."""
        lots = tuple(_Lot(_parsed(lot["parts"]), lot["owner"], lot["stopped"]) for lot in fields["lots"])
        return cls(**{**fields, "lots": lots, "left": _parsed(fields["left"])})


def _after_loss(lot: _Lot, new_ranks: Mapping[int, int], stopped: int) -> _Lot:
    if lot.owner is None:
        return lot
    owner = new_ranks.get(lot.owner)
    return replace(lot, owner=owner, stopped=stopped if owner is None else None)


def _shards(first: int, size: int) -> tuple[_Lot, ...]:
    """Returns a lot for each of ``size`` shards: its batches from ``first`` on."""
    return tuple(_Lot((ShardBatches(rank, size, range(first, OPEN)),), rank) for rank in range(size))


def _every(parts: Iterable[ShardBatches], rank: int, size: int) -> Iterator[ShardBatches]:
    """Yields the elements ``rank``, ``rank + size``, … of the batches of ``parts``, one after the other."""
    before = 0
    for part in parts:
        if batches := part.batches[(rank - before) % size :: size]:
            yield replace(part, batches=batches)
        before += len(part.batches)


def _listed(parts: Iterable[ShardBatches]) -> list[list[int]]:
    return [[part.shard, part.shards, part.batches.start, part.batches.stop, part.batches.step] for part in parts]


def _parsed(parts: Iterable[list[int]]) -> tuple[ShardBatches, ...]:
    return tuple(ShardBatches(shard, shards, range(*batches)) for shard, shards, *batches in parts)
