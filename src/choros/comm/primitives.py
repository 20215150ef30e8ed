"""What an engine implements: the primitives of a set of ranks, which move bytes once all members have agreed.

How its ranks meet is the engine's: ``engines/xla.py`` has MPI or a store do it. The primitives, ``_split`` among them,
call no public collective. A member that is lost is a ``PeerLostError``; only an elastic engine goes on without it.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from choros.comm.reduction import Array, Reduction
from choros.comm.request import SHUTDOWN
from choros.comm.waiting import Awaited
from choros.transport.secret import Signatures
from choros.wording import ranks_text

#: A chunk of this size still fits the caches.
CHUNK_BYTES = 4 << 20


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
    def between(cls, before: Sequence[int], after: Sequence[int], *, ends_job: bool = False) -> Self:
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
            total = len(self.lost) + len(self.new_ranks)
            parts.append(f"{ranks_text(self.lost, None)} of {total} {'were' if len(self.lost) > 1 else 'was'} lost")
        if self.joined:
            parts.append(f"{len(self.joined)} {'have' if len(self.joined) > 1 else 'has'} joined")
        number = len(self.new_ranks) + len(self.joined)
        do = ("is left", "are left") if self.ends_job else ("goes on", "go on")
        return ", ".join([*parts, f"{number} {do[number > 1]}"])


class Primitives(ABC):
    """The members of a communicator, as one of them sees them, and what their engine can do.

    Attributes:
        engine: its engine's name, that of a module in ``comm/engines``.
        rank: this process among the members, ``0 … size - 1``.
        size: the number of members.
        launched: the members, by their ranks: the number that the launcher has given each, which never changes.
        whole: the communicator of all ranks of the job, of which this is a part.
        collectives: the number of collectives in which this process has participated.
        chunk_bytes: arrays are sent in chunks of at most this many bytes.
        direct_bytes: of arrays sent together, those of this many bytes and more are reduced where their results are;
            ``None``: none are, nor is one that is alone.
        bytes_sent: the number of bytes of arrays it has contributed to them, which compression reduces.
        signatures: those of objects that the members exchange; they have a key if the engine's connections need one.
        elastic: whether the members go on without those that are lost; see ``atomic``.
        is_new: whether this process is not a rank yet: others have started it, and will take it in (``local.py``).
        on_change: is called whenever the members have changed.
        raises_loss: whether ``atomic`` raises an error after such a change, and does not run the collective again.
        opening: where new ranks take the places of lost ones, when all call ``admit``; all enter it at the same place.
        notice: bits, such as ``END``, that an elastic engine tells all other ranks with the agreement at the end of the
            next collective, without a message of their own.
        noticed: the bits that any rank has sent with the last one; the same on all ranks.
        last_joined: the members that were the last to ``join``, the last time, as the launcher numbers them; none if
            all did at the same time.
    """

    engine: str
    elastic = False
    is_new = False
    direct_bytes: int | None = None
    raises_loss = False
    signatures = Signatures()

    def __init__(self, rank: int, launched: Sequence[int]) -> None:
        self.rank = rank
        self.launched = tuple(launched)
        self.whole: Primitives = self
        self.size = len(self.launched)
        self.collectives = 0
        self.bytes_sent = 0
        self.chunk_bytes = CHUNK_BYTES
        self.on_change: Callable[[Change], None] | None = None
        self.opening: Callable[[], AbstractContextManager[None]] = nullcontext
        self.notice = self.noticed = 0
        self.last_joined: tuple[int, ...] = ()
        #: The request that this rank has made last.
        self._asked = SHUTDOWN

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' present ranks in the whole job, ascending; -1 for those that are lost."""
        if self.whole is self:
            return tuple(range(self.size))
        present = {number: rank for rank, number in enumerate(self.whole.launched)}
        return tuple([present.get(number, -1) for number in self.launched])

    def _long_wait(self) -> Awaited:
        """The wait for the other members in the current collective."""
        return str(self._asked), self.launched

    def _settle(self, *, completed: bool) -> bool:
        """Whether all members have completed the collective: the same answer on all of them."""
        return completed

    def _recover(self) -> None:  # noqa: B027  (of other engines all members are left)
        """Makes those that are left the members; a ``PeerLostError`` if they are too few."""

    def _admit(self) -> bool:
        """Makes the process that waits a member: sets what ``_recover`` sets. Returns whether it is one."""
        return False

    def hosts(self) -> list[str]:
        """The name of every rank's host, or of a rank on it."""
        return ["localhost"] * self.size

    def abandon(self) -> None:  # noqa: B027  (most engines' connections end with the process)
        """Releases what a rank can release alone, once another has ended; no method may be called after it."""

    @abstractmethod
    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        """The one control message: gathers every rank's two integers; shape ``(size, 2)``; valid until the next one."""

    @abstractmethod
    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        """Reduces the flat ``buffer`` in place with SUM, MIN, MAX or PRODUCT."""

    def _allreduce_anywhere(self, buffer: Array, op: Reduction) -> None:
        """``_allreduce`` of memory that may be from ``_allocate`` on some ranks, and not on others."""
        self._allreduce(buffer, op)

    @abstractmethod
    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        """Concatenates the ranks' bytes, ``counts[i]`` from rank ``i``."""

    def _allgather_into(self, buffer: NDArray[np.uint8], counts: Sequence[int]) -> None:
        """``_allgather`` of a ``buffer`` that has this rank's bytes at their place."""
        start = sum(counts[: self.rank])
        buffer[...] = self._allgather(buffer[start : start + counts[self.rank]], counts)

    @abstractmethod
    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Overwrites ``buffer`` with the root's."""

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: Reduction) -> Array:
        """Reduces ``buffer`` and returns this rank's part, ``counts[i]`` items for rank ``i``."""
        self._allreduce(buffer, op)
        start = sum(counts[: self.rank])
        return buffer[start : start + counts[self.rank]]

    def _reducescatter_into(self, out: Array, own: Array, buffer: Array, counts: Sequence[int], op: Reduction) -> None:
        """``_reducescatter`` of a ``buffer`` from ``_allocate`` that lacks this rank's part, ``own``, into ``out``."""
        start = sum(counts[: self.rank])
        buffer[start : start + own.size] = own
        out[...] = self._reducescatter(buffer, counts, op)

    @abstractmethod
    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        """Sends ``send_counts[i]`` bytes to rank ``i`` and concatenates ``receive_counts[i]`` from each."""

    def _allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """``nbytes`` bytes that ``_allreduce`` is fast on; called by all members."""
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # aligned, so that frameworks use it in place

    def _is_registered(self, buffer: Array) -> bool:
        """Whether ``buffer`` is in memory from ``_allocate`` that ``_allreduce`` treats in another way."""
        del buffer
        return False

    @abstractmethod
    def _split(self, ranks: Sequence[int]) -> Self | None:
        """The communicator of the members ``ranks``; called by all members."""

    def _close(self) -> None:  # noqa: B027  (some have none)
        """Releases the engine's resources; called by all members."""
