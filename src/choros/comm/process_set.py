"""Subsets of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from choros.comm.membership import Membership
from choros.errors import ConfigError, NotInitializedError

if TYPE_CHECKING:
    from choros.comm.communicator import Communicator

__all__ = ["ProcessSet"]


@final
class ProcessSet:
    """Some of the ranks, to communicate among themselves (Horovod's ``ProcessSet``).

    It can be used once it is registered: by ``init(process_sets=[…])`` or ``add_process_set``.

    Attributes:
        ranks: the global ranks in it, ascending.
        process_set_id: its number, ``0`` for all ranks; ``None`` while it is not registered.
        membership: the ranks it has, or last had, since when; ``None`` before it is registered for the first time.

    Example:
        >>> even = ProcessSet([2, 0])
        >>> even.ranks
        [0, 2]
        >>> even.process_set_id is None
        True
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
            raise ConfigError(f"ProcessSet({list(ranks)}): expected distinct ranks, 0 or more.")
        self.ranks = sorted(ranks)
        self.process_set_id: int | None = None
        self.membership: Membership | None = None
        self._communicator: Communicator | None = None

    def register(self, process_set_id: int, ranks: Sequence[int], communicator: Communicator | None) -> None:
        """Makes the set usable; ``communicator`` is ``None`` on ranks outside it."""
        self.process_set_id = process_set_id
        self.ranks = list(ranks)
        known = self.membership
        self.membership = Membership(0, tuple(ranks)) if known is None else known.successor(self.ranks)
        self._communicator = communicator

    def unregister(self) -> None:
        """Makes the set unusable and frees its communicator."""
        if self._communicator is not None:
            self._communicator.close()
        self._forget()

    def abandon(self) -> None:
        """``unregister`` after another rank has ended: frees what this rank can free alone."""
        if self._communicator is not None:
            self._communicator.abandon()
        self._forget()

    def _forget(self) -> None:
        self.process_set_id = None
        self._communicator = None

    @property
    def communicator(self) -> Communicator:
        """The members' communicator.

        Raises:
            NotInitializedError: the set is not registered.
            ConfigError: this process is not a member.
        """
        if self.process_set_id is None:
            raise NotInitializedError("a collective" if self.ranks == [] else f"a collective of {self}")
        if self._communicator is None:
            raise ConfigError(
                f"this rank is not in {self}: only its members may call collectives on it. Guard the call with "
                "process_set.included()."
            )
        return self._communicator

    def included(self) -> bool | None:
        """Whether this process is a member; ``None`` if the set is not registered."""
        return None if self.process_set_id is None else self._communicator is not None

    def size(self) -> int | None:
        """The number of members; ``None`` if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process among the members; ``None`` if the set is not registered or we are not in it."""
        return None if self._communicator is None else self._communicator.rank

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"
