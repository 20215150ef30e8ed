"""The membership of a process set: its ranks, and how often they have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Membership:
    """A set's ranks between two changes, after which plans are made again; ``epoch`` counts earlier registrations.

    >>> first = Membership(0, (0, 1))
    >>> first.successor([0, 1]) == first
    False
    """

    epoch: int
    ranks: tuple[int, ...]
    admissions: int = 0

    def successor(self, ranks: Sequence[int], *, admits: bool = False) -> Membership:
        """The next epoch, with these ranks; ``admits``: there are new ones among them."""
        return Membership(self.epoch + 1, tuple(ranks), self.admissions + admits)


@dataclass(frozen=True)
class Change:
    """How members have changed: ``lost`` and the keys of ``new_ranks`` are ranks before, all others ranks now.

    >>> change = Change.between((0, 1, 2), (0, 2, 3))
    >>> change.new_ranks, change.lost, change.joined
    ({0: 0, 2: 1}, (1,), (2,))
    >>> str(change)
    'rank 1 of 3 was lost, 1 has joined, 3 go on'
    >>> str(Change.between((0, 1, 2), (0,), ends_job=True))
    'ranks 1, 2 of 3 were lost, 1 is left'
    """

    new_ranks: Mapping[int, int]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    ends_job: bool = False

    @classmethod
    def between(cls, before: Sequence[int], after: Sequence[int], *, ends_job: bool = False) -> Change:
        """Returns the change, from numbers that identify the members before and after it."""
        stayed = {rank: after.index(member) for rank, member in enumerate(before) if member in after}
        return cls(
            new_ranks=stayed,
            lost=tuple(rank for rank in range(len(before)) if rank not in stayed),
            joined=tuple(rank for rank, member in enumerate(after) if member not in before),
            ends_job=ends_job,
        )

    def __str__(self) -> str:
        parts = []
        if self.lost:
            ranks = f"rank{'s' if len(self.lost) > 1 else ''} {', '.join(map(str, self.lost))}"
            total = len(self.lost) + len(self.new_ranks)
            parts.append(f"{ranks} of {total} {'were' if len(self.lost) > 1 else 'was'} lost")
        if self.joined:
            parts.append(f"{len(self.joined)} {'have' if len(self.joined) > 1 else 'has'} joined")
        number = len(self.new_ranks) + len(self.joined)
        do = ("is left", "are left") if self.ends_job else ("goes on", "go on")
        return ", ".join([*parts, f"{number} {do[number > 1]}"])
