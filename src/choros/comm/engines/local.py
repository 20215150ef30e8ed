"""The engine of a single rank: every collective returns its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import Array, Communicator
from choros.comm.reduction import Reduction
from choros.topology import Topology

__all__ = ["LocalCommunicator", "finalize", "start"]


@final
class LocalCommunicator(Communicator):
    """The engine of a job of one rank; it needs no further packages.

    Example:
        >>> LocalCommunicator().allgather([[1], [2]]).shape
        (2, 1)
    """

    engine = "local"

    def __init__(self, global_rank: int = 0) -> None:
        super().__init__(0, [global_rank])

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        return header.reshape(1, 2)

    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        del buffer, op

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        del counts
        return send.copy()

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        del buffer, root

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: Reduction) -> Array:
        del counts, op
        return buffer

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        del receive_counts
        return send[: send_counts[0]].copy()

    def _split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        del ranks
        return LocalCommunicator(self.ranks[0])

    def _close(self) -> None:
        pass


def start(topology: Topology, comm: object = None) -> tuple[LocalCommunicator, Topology]:
    """Returns the communicator of the only rank, and its position."""
    del comm
    return LocalCommunicator(), topology


def finalize() -> None:
    """Does nothing: this engine has no resources."""
