"""Subsets of ranks, and how often their ranks have changed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, final

from choros.errors import ConfigError, NotInitializedError

if TYPE_CHECKING:
    from choros.comm.communicator import Communicator


@final
class ProcessSet:
    """Some of the ranks, to communicate among themselves (Horovod's ``ProcessSet``).

    It can be used once it is registered: by ``init(process_sets=[…])`` or ``add_process_set``.

    Args:
        ranks_or_comm: the global ranks in it, in any order, or an mpi4py communicator of these. Each rank gives
            ``init(process_sets=[…])`` the one that it is in, such as its result of ``MPI.COMM_WORLD.Split(color)``.

    Attributes:
        ranks: the global ranks in it, ascending.
        mpi_comm: the communicator that it was created from.
        process_set_id: its number, ``0`` for all ranks; ``None`` while it is not registered.
        epoch: how often it was registered, or its members have changed: then plans are made again.
        admissions: how often new ones were among these.

    Example:
        >>> even = ProcessSet([2, 0])
        >>> even.ranks
        [0, 2]
        >>> even.process_set_id is None
        True
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        is_comm = not isinstance(ranks_or_comm, Iterable)
        self.mpi_comm: Any = ranks_or_comm if is_comm else None
        ranks = _ranks_of(ranks_or_comm) if is_comm else list(ranks_or_comm)
        if not all(isinstance(rank, Integral) for rank in ranks):
            raise ConfigError(f"ProcessSet({ranks}): expected ranks, or an mpi4py communicator.")
        if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
            raise ConfigError(f"ProcessSet({ranks}): expected distinct ranks, 0 or more.")
        self.ranks = sorted(int(rank) for rank in ranks)
        self.process_set_id: int | None = None
        self.epoch = self.admissions = 0

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        return self  # the ranks are no part of what is copied, such as a model

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (None if self is global_process_set else self.ranks,)

    def register(self, process_set_id: int, ranks: Sequence[int], communicator: Communicator | None) -> None:
        """Makes the set usable; ``communicator`` is ``None`` on ranks outside it."""
        self.process_set_id = process_set_id
        self.ranks = list(ranks)
        self.epoch += 1
        if communicator is not None:
            self.communicator = communicator

    def changed(self, ranks: Sequence[int], *, admits: bool = False) -> None:
        """Notes that its members have changed, or have other ranks; ``admits``: that there are new ones among them."""
        if self.epoch:
            self.ranks = list(ranks)
            self.epoch += 1
            self.admissions += admits

    def unregister(self) -> None:
        """Makes the set unusable and frees its communicator."""
        if self.included():
            self.communicator.close()
        self._forget()

    def abandon(self) -> None:
        """``unregister`` after another rank has ended: frees what this rank can free alone."""
        if self.included():
            self.communicator.abandon()
        self._forget()

    def _forget(self) -> None:
        self.process_set_id = None
        vars(self).pop("communicator", None)

    @cached_property
    def communicator(self) -> Communicator:
        """The members' communicator, which ``register`` sets; without, it raises an error.

        Raises:
            NotInitializedError: before ``init()``.
            ConfigError: the set is not registered, or this process is not a member.
        """
        self.check_registered("a collective" if self.ranks == [] else f"a collective of {self}")
        raise ConfigError(
            f"this rank is not in {self}: only its members may call collectives on it. Guard the call with "
            "process_set.included()."
        )

    def check_registered(self, what: str) -> None:
        """Raises a ``NotInitializedError`` before ``init()``, and a ``ConfigError`` if the set is not registered; in
        its message ``what`` names what needs it.
        """
        if self.process_set_id is None:
            if global_process_set.process_set_id is None:
                raise NotInitializedError(what)
            raise ConfigError(
                f"{what}: the process set of the ranks {self.ranks} is not registered: call hvd.add_process_set() with "
                "it on all ranks, after each init()."
            )

    def included(self) -> bool | None:
        """Whether this process is a member; ``None`` if the set is not registered."""
        return None if self.process_set_id is None else "communicator" in vars(self)

    def size(self) -> int | None:
        """The number of members; ``None`` if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process among the members; ``None`` if the set is not registered or we are not in it."""
        return self.communicator.rank if self.included() else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


#: All ranks (Horovod's ``global_process_set``); usable after ``init()``.
global_process_set = ProcessSet(())


def _unpickled(ranks: list[int] | None) -> ProcessSet:
    return global_process_set if ranks is None else ProcessSet(ranks)


def has_others(process_set: ProcessSet) -> bool:
    """Whether this rank has others to train with, or may have: the last rank that is left counts its steps, too."""
    return bool(process_set.included()) and (process_set.communicator.size > 1 or process_set.communicator.elastic)


def _ranks_of(comm: Any) -> list[int]:
    """The ranks of an mpi4py communicator, as the launcher numbers them."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm) or comm == mpi.COMM_NULL:
        raise ConfigError(f"ProcessSet({comm!r}): expected ranks, or an mpi4py communicator that this rank is in.")
    members = comm.Get_group()
    ranks: list[int] = members.Translate_ranks(list(range(members.size)), mpi.COMM_WORLD.Get_group())
    return ranks
