"""Which batches of an epoch have been consumed, and which rank consumes the others; the same on every rank.

Shard k of n has the rows ``shard_range(rows, k, n)`` of every global batch. All ranks make each step together, so
one counter says how far all are::

    step                    0 1 2 3 4 5 6 7
    shard 0   rank 0        x x x x x x x x
    shard 1   rank 1        x x x +               killed in step 3: from there on the shard has no owner
    shard 2   rank 2 → 1    x x x x x x x x       survivors keep their shards, of which they may have prefetched batches
    shard 1   rank 2              . . x x x x     a new rank takes the shard over, here at step 5

    left over               shard 1: batches 3, 4

What is left over at the end of the epoch's batches, before validation, is sharded over the ranks of that moment,
until nothing is left. A job started again with other ranks divides anew the global batches that none has begun.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from choros.data.rows import Part

T = TypeVar("T")

#: The end of a range of batches whose number is not known yet.
OPEN = 2**53

#: Returns the number of batches in which shard ``k`` of ``n`` has rows.
Length = Callable[[int, int], int]


@dataclass(frozen=True)
class ShardBatches:
    """Some batches of one shard of ``shards``: their indices in the epoch, up to ``OPEN`` if their number is unknown.

    >>> ShardBatches(1, 4, range(3, 7)).closed(lambda shard, shards: 5)
    ShardBatches(shard=1, shards=4, batches=range(3, 5))
    """

    shard: int
    shards: int
    batches: range

    def closed(self, length: Length) -> ShardBatches:
        """Returns those batches that exist."""
        stop = min(self.batches.stop, max(self.batches.start, length(self.shard, self.shards)))
        return replace(self, batches=range(self.batches.start, stop, self.batches.step))

    def taken_from(self, epoch: Iterable[T]) -> Iterator[T]:
        """Yields those of an epoch's global batches; they are read in sequence."""
        return itertools.islice(epoch, self.batches.start, self.batches.stop, self.batches.step)

    def part(self, local: int = 1) -> Part:
        """Returns the rows of the shard in each global batch, for a process of ``local`` replicas."""
        return Part(self.shard * local, self.shards * local, local)


@dataclass(frozen=True)
class _Lot:
    """The batches that one rank consumes, one a step; ``owner`` is ``None`` since it was lost, in step ``stopped``."""

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


@dataclass(frozen=True)
class Ledger:
    """An epoch's state since its batches, or those left over (``is_tail``), were sharded; methods return the next.

    >>> def length(shard: int, shards: int) -> int:
    ...     return 4
    >>> ledger = Ledger.of_epoch(0, size=3).stepped(2).lost({0: 0, 2: 1}).stepped(2)
    >>> ledger.left_over(length)
    (ShardBatches(shard=1, shards=3, batches=range(2, 4)),)
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
        """The ledger of the beginning of an epoch: rank k owns shard k."""
        return cls(epoch, _shards(0, size))

    # what happens -----------------------------------------------------------------------------------

    def stepped(self, steps: int = 1) -> Self:
        """All ranks have consumed one more batch of their lots; a rank whose lot has ended stays at its end."""
        return replace(self, steps=self.steps + steps)

    def lost(self, new_ranks: Mapping[int, int], accumulated: int = 0) -> Self:
        """Ranks without a new one were lost in the step that ``steps`` does not count yet: their batch was not
        consumed, nor their part of the last ``accumulated`` steps, micro-batches of an update that is not made yet.
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
        """A new rank takes over an ownerless lot from now on, or waits for the epoch's end or what is left over."""
        free = next((index for index, lot in enumerate(self.lots) if lot.owner is None), None)
        if free is None:
            return self
        lot = self.lots[free]
        lots = (*self.lots[:free], _Lot(lot.parts, rank), *self.lots[free + 1 :])
        return replace(self, lots=lots, left=(*self.left, *lot.between(lot.stopped or 0, self.steps)))

    def has_place(self, length: Length) -> bool:
        """Whether a new rank can take over a lot now: one has batches left and no owner, and all owners have more.

        >>> ledger = Ledger.of_epoch(0, size=2).lost({0: 0})
        >>> ledger.has_place(lambda shard, shards: 4), ledger.stepped(4).has_place(lambda shard, shards: 4)
        (True, False)
        >>> ledger.stepped(4).has_place(lambda shard, shards: 4 + shard)
        False
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

    def of_rank(self, rank: int) -> tuple[ShardBatches, ...]:
        """Returns the batches that ``rank`` is to consume, one in each step, from the current step on."""
        return next((lot.between(self.steps) for lot in self.lots if lot.owner == rank), ())

    def left_over(self, length: Length) -> tuple[ShardBatches, ...]:
        """All unconsumed batches; ``length(k, n)``: in how many shard k of n has rows, the same on every rank."""
        parts = list(self.left)
        for lot in self.lots:
            parts += lot.between(self.steps if lot.stopped is None else lot.stopped)
        return tuple(part for each in parts if (part := each.closed(length)).batches)

    def is_done(self, length: Length) -> bool:
        """Whether each batch of the epoch has been consumed."""
        return not self.left_over(length)

    def resharded(self, size: int, length: Length) -> Self:
        """All unconsumed batches: rank r of m has the r-th, (r+m)-th, …; as many equally long shards stay whole."""
        parts = self.left_over(length)
        numbers = [len(part.batches) for part in parts]
        if len(parts) == size and max(numbers) - min(numbers) <= 1:
            lots = tuple(_Lot((part,), rank) for rank, part in enumerate(parts))
        else:
            lots = tuple(_Lot(tuple(_every(parts, rank, size)), rank) for rank in range(size))
        return replace(self, lots=lots, steps=0, left=(), first=0, is_tail=True)

    def resumed(self, size: int, length: Length) -> Self:
        """The ledger of a job that goes on with ``size`` ranks from a commit: global batches that no rank has begun are
        sharded anew; those of which some shards were consumed, and all of a tail, stay left over for the epoch's end.
        """
        if self.is_tail:
            return replace(self, lots=(), steps=0, left=self.left_over(length))
        stopped = (part for lot in self.lots if lot.owner is None for part in lot.between(lot.stopped or 0, self.steps))
        first = self.first + self.steps
        return replace(self, lots=_shards(first, size), steps=0, left=(*self.left, *stopped), first=first)

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
