"""MPI's own allreduce over all ranks, in chunks.

Open MPI moves 64 MiB in chunks of some MiB in a third of the time that one call takes.
"""

from __future__ import annotations

from typing import Any, final

from mpi4py import MPI
from numpy.typing import NDArray

from choros.comm.algorithms.algorithm import AllreduceAlgorithm
from choros.comm.fusion import CHUNK_BYTES
from choros.comm.reduction import Reduction

__all__ = ["FlatAllreduce"]

_OPS = {
    Reduction.SUM: MPI.SUM,
    Reduction.MIN: MPI.MIN,
    Reduction.MAX: MPI.MAX,
    Reduction.PRODUCT: MPI.PROD,
}


@final
class FlatAllreduce(AllreduceAlgorithm):
    """MPI's allreduce: for small messages, and if no two ranks share a host."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def allreduce(self, buffer: NDArray[Any], op: Reduction) -> None:
        """See ``AllreduceAlgorithm``."""
        items = CHUNK_BYTES // buffer.itemsize
        for start in range(0, buffer.size, items):
            self._comm.Allreduce(MPI.IN_PLACE, buffer[start : start + items], _OPS[op])
