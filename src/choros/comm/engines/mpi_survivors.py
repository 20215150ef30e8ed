"""What MPI's fault tolerance (MPI Forum, ULFM, MPI 5.0) is used for: noticing that a member is lost, agreeing, going
on without it, if those that are left are a quorum, so that no two parts of a job both do. It needs an mpirun that was
started with ``--with-ft ulfm``::

    rank 0                  rank 1        rank 2
    Iallgather ✗            killed        Iallgather ✗           one notices the loss; the others, whose peer it may
    Revoke ──────────────────────────►    ✗ revoked              not have been, are told by the revocation
    Agree(0) ◄───────────────────────►    Agree(0)               no rank has completed the collective
    Shrink ◄─────────────────────────►    Shrink                 a communicator of ranks 0 and 2
    Agree(1) ◄───────────────────────►    Agree(1)               what belongs to it is made on both, or again
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from choros import durations
from choros.comm.waiting import Awaited, wait_until

T = TypeVar("T")

#: In Open MPI's ``mpiruntime.h``: OMPI_MPI_STATE_FINALIZE_COMPLETED.
_FINALIZED = 5
_LOST = frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED})


def is_loss(error: BaseException) -> bool:
    """Whether MPI has raised ``error`` because a member of the communicator is lost."""
    return isinstance(error, MPI.Exception) and error.Get_error_class() in _LOST


def agreed(comm: MPI.Intracomm, *, completed: bool) -> bool:
    """Whether all members have ``completed``: the same answer on all that are left. ``comm`` may be revoked."""
    return bool(common_bits(comm, int(completed)))


def common_bits(comm: MPI.Intracomm, bits: int, describe: Callable[[], Awaited] | None = None) -> int:
    """Returns the bits that all have set, the same on all left; 0 if a member was lost. ``comm`` may be revoked."""
    common = np.array(bits, np.int32)
    try:
        wait_until(comm.Iagree(common).Test, describe=describe)
    except MPI.Exception as error:
        if is_loss(error):
            return 0
        raise
    return int(common)


def allreduced(comm: MPI.Intracomm, number: int, op: MPI.Op) -> int:
    """Not mpi4py's ``allreduce`` of objects, which probes: a probe may not end when ``comm`` is revoked."""
    buffer = np.array([number], np.int64)
    comm.Allreduce(MPI.IN_PLACE, buffer, op)
    return int(buffer[0])


def revoke(*comms: MPI.Intracomm | None) -> None:
    """Makes all calls of all members on ``comms`` fail, except ``agreed`` and ``shrunk``."""
    for comm in comms:
        if comm is not None:
            with contextlib.suppress(MPI.Exception):
                comm.Revoke()


def unless_lost(make: Callable[[], T], *comms: MPI.Intracomm) -> T | None:
    """Returns what ``make`` returns; ``None`` if a member was lost in it: then ``comms`` are revoked."""
    try:
        return make()
    except MPI.Exception as error:
        if not is_loss(error):
            raise
        revoke(*comms)
        return None


def shrunk(comm: MPI.Intracomm, make: Callable[[MPI.Intracomm], T]) -> T:
    """Returns what ``make`` makes of a communicator of those left, on all; called again if more are lost meanwhile."""
    size, problem = 0, None
    while True:
        comm = MPI.Intracomm(comm.Shrink())  # brief, as all have just agreed; Open MPI's Ishrink fails
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        if problem is not None and comm.Get_size() == size:
            raise problem
        made, size, problem = None, comm.Get_size(), None
        try:
            made = unless_lost(partial(make, comm), comm)
        except Exception as error:  # noqa: BLE001  (what is received from a member that is lost may be anything)
            problem = error
        if agreed(comm, completed=made is not None) and made is not None:
            return made


def see_off(comm: MPI.Intracomm) -> None:
    """Takes part in MPI's messages until all know that all leave: the last ones may need this process on their way."""
    end = time.monotonic() + durations.FAREWELL
    with contextlib.suppress(MPI.Exception):  # another one has gone, as it knows
        farewell = comm.Ibarrier()
        while not farewell.Test() and time.monotonic() < end:
            time.sleep(durations.FAREWELL_LOOK)
    leave_unfinalized()


def leave_unfinalized() -> None:
    """Keeps mpi4py from ``MPI_Finalize``, which may wait for lost ranks for ever, as the process ends. It calls that
    if the program has imported it before choros.
    """
    with contextlib.suppress(ValueError):  # this MPI has no such variable
        ctypes.c_int.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_state").value = _FINALIZED


def why_not_to_go_on(hosts: Sequence[Hashable], left: Collection[int], least: int) -> str:
    """Returns why the ranks ``left``, as numbered before the loss, must not go on; empty if they may. The death of a
    process is certain, as its host reports it; all ranks of a host, lost at once, may be alive: then more than half of
    the ranks must be left::

        host a  ranks 0 1 2 ┐                        go on: 3 are more than half of 4
                            ╳  the link is cut
        host b  rank 3      ┘                        stops: 1 is not, and cannot tell a lost host from a lost link

    >>> why_not_to_go_on("aab", {0, 1}, least=1)
    ''
    >>> why_not_to_go_on("aabb", {0, 1}, least=1)
    '2 of 4 ranks are left, not more than half, and a whole host is lost, whose ranks may be alive'
    >>> why_not_to_go_on("aabb", {0, 2}, least=1)
    ''
    >>> why_not_to_go_on("aaa", {2}, least=2)
    '1 of 3 ranks is left, fewer than --min-np 2'
    """
    said = f"{len(left)} of {len(hosts)} ranks {'is' if len(left) == 1 else 'are'} left"
    if len(left) < least:
        return f"{said}, fewer than --min-np {least}"
    lost_hosts = set(hosts) - {hosts[rank] for rank in left}
    if lost_hosts and 2 * len(left) <= len(hosts):
        return f"{said}, not more than half, and a whole host is lost, whose ranks may be alive"
    return ""
