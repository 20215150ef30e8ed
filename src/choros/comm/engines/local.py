"""The engine of a single rank, for which every collective is as if all ranks did exactly what this one does. A new rank
of an elastic job has it, too, until the others take it in: so its script comes to where it trains. If the others are
in their second ``fit`` by then, it passes the first by: its model is not trained, and not to be saved::

    chorosrun -np 3 …    rank 1 is lost, and a process is started in its place

    hvd.size()                               3, as when the job started
    broadcast(weights, root=0)               its own weights
    allreduce([1.0])                         [1.0], the mean of three equal values
    allgather([7])                           [7, 7, 7]
    fit(…), or a function of elastic.run     waits until the others take it in, and gets their state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import Communicator
from choros.comm.reduction import Array, Reduction
from choros.topology import Topology


@final
class LocalCommunicator(Communicator):
    """One rank, which needs no further packages; or all ranks of ``hosts``, of which only this one exists, until it can
    ``enter``.

    >>> LocalCommunicator().allgather([[1], [2]]).shape
    (2, 1)
    >>> LocalCommunicator(1, ["a", "a", "b"]).allgather([7])
    array([7, 7, 7])
    """

    engine = "local"

    def __init__(
        self,
        rank: int = 0,
        hosts: Sequence[str] = ("localhost",),
        enter: Callable[[], Communicator | None] | None = None,
    ) -> None:
        super().__init__(rank, range(len(hosts)))
        self._hosts = list(hosts)
        self.enter = enter
        if enter is not None:
            self.engine, self.elastic, self.is_new = "mpi", True, True

    def hosts(self) -> list[str]:
        """The hosts at the start of the job."""
        return self._hosts

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        row = header.reshape(1, 2)
        return row if self.size == 1 else row.repeat(self.size, axis=0)

    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        if self.size > 1 and op is Reduction.SUM:
            np.multiply(buffer, self.size, out=buffer, casting="unsafe")
        elif self.size > 1 and op is Reduction.PRODUCT:
            np.power(buffer, self.size, out=buffer, casting="unsafe")

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        return send.copy() if self.size == 1 else np.concatenate([send[:count] for count in counts])

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        pass

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        del receive_counts
        start = sum(send_counts[: self.rank])
        return np.tile(send[start : start + send_counts[self.rank]], self.size)

    def _split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        if self.rank not in ranks:
            return None
        hosts = [self._hosts[rank] for rank in ranks]
        return LocalCommunicator(list(ranks).index(self.rank), hosts, self.enter)


def start(topology: Topology, comm: object = None) -> tuple[LocalCommunicator, Topology]:
    """Returns the communicator of the only rank, and its position."""
    del comm
    return LocalCommunicator(), topology


def finalize() -> None:
    """Does nothing: this engine has no resources."""
