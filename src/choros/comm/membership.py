"""The membership of a process set: its ranks, and how often they have changed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Membership"]


@dataclass(frozen=True)
class Membership:
    """The ranks of a process set between two changes; plans made for them are made again after a change.

    Attributes:
        epoch: how often the set has been registered before: 0 after the first ``init()``, one more after each further
            one. The same on every rank.
        ranks: the global ranks, ascending.

    Example:
        >>> first = Membership(0, (0, 1))
        >>> first.successor([0, 1]) == first
        False
    """

    epoch: int
    ranks: tuple[int, ...]

    def successor(self, ranks: list[int]) -> Membership:
        """The next epoch, with these ranks."""
        return Membership(self.epoch + 1, tuple(ranks))
