"""The communicator of a new rank until the others take it in: as if every rank did exactly what this one does.

::

    chorosrun -np 3 …    rank 1 is lost, and a process is started in its place

    hvd.size()                               3, as when the job started
    broadcast(weights, root=0)               its own weights
    allreduce([1.0])                         [1.0], the mean of three equal values
    allgather([7])                           [7, 7, 7]
    fit(…), or a function of elastic.run     waits until the others take it in, and gets their state

So a script comes to where it trains, whatever it makes of the ranks before. If the others are in their second ``fit``
by then, it passes the first by, and is the last rank from there on: its model is not trained, and not to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import Array, Communicator
from choros.comm.reduction import Reduction

__all__ = ["NewcomerCommunicator"]


@final
class NewcomerCommunicator(Communicator):
    """All ranks, of which only this one exists, and the others are taken to do the same.

    Args:
        rank: this process among them.
        hosts: for each of them, the name of its host.
        opening: see ``Communicator.opening``.
        enter: waits in an opening; returns the communicator of all ranks, or ``None`` if the others are in a later one.

    Example:
        >>> NewcomerCommunicator(1, ["a", "a", "b"]).allgather([7])
        array([7, 7, 7])
    """

    engine = "mpi"
    elastic = True
    is_new = True

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        opening: Callable[[], AbstractContextManager[None]] = nullcontext,
        enter: Callable[[], Communicator | None] = lambda: None,
    ) -> None:
        super().__init__(rank, range(len(hosts)))
        self._hosts = list(hosts)
        self._opening = opening
        self.enter = enter

    def hosts(self) -> list[str]:
        """The hosts at the start of the job."""
        return self._hosts

    def opening(self) -> AbstractContextManager[None]:
        """See ``Communicator``."""
        return self._opening()

    def as_last(self) -> NewcomerCommunicator:
        """Returns the communicator of the same ranks, of which this process is the last one."""
        return NewcomerCommunicator(self.size - 1, self._hosts, self._opening, self.enter)

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.tile(header, (self.size, 1))

    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        if op is Reduction.SUM:
            np.multiply(buffer, self.size, out=buffer, casting="unsafe")
        elif op is Reduction.PRODUCT:
            np.power(buffer, self.size, out=buffer, casting="unsafe")

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        return np.concatenate([send[:count] for count in counts])

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        pass

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: Reduction) -> Array:
        start = sum(counts[: self.rank])
        own = buffer[start : start + counts[self.rank]].copy()
        self._allreduce(own, op)
        return own

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        del receive_counts
        start = sum(send_counts[: self.rank])
        return np.tile(send[start : start + send_counts[self.rank]], self.size)

    def _split(self, ranks: Sequence[int]) -> NewcomerCommunicator | None:
        if self.rank not in ranks:
            return None
        members = NewcomerCommunicator(list(ranks).index(self.rank), [self._hosts[rank] for rank in ranks])
        members.ranks = tuple(self.ranks[rank] for rank in ranks)
        return members

    def _close(self) -> None:
        pass
