"""What MPI's fault tolerance (ULFM) is used for: noticing that a member is lost, agreeing, going on without it.

::

    rank 0                  rank 1        rank 2
    Iallgather ✗            killed        Iallgather ✗           one notices the loss; the others, whose peer it may
    Revoke ──────────────────────────►    ✗ revoked              not have been, are told by the revocation
    Agree(0) ◄───────────────────────►    Agree(0)               no rank has completed the collective
    Shrink ◄─────────────────────────►    Shrink                 a communicator of ranks 0 and 2
    Agree(1) ◄───────────────────────►    Agree(1)               what belongs to it is made on both, or again

It needs an mpirun that was started with ``--with-ft ulfm``.
Source: MPI Forum, *User-Level Failure Mitigation* (MPI 5.0, chapter "Process Fault Tolerance").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from choros.comm.mpi_requests import wait_for
from choros.comm.waiting import LongWait

__all__ = ["agreed", "common_bits", "is_loss", "revoke", "shrunk", "unless_lost"]

T = TypeVar("T")

_LOST = frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED})


def is_loss(error: BaseException) -> bool:
    """Whether MPI has raised ``error`` because a member of the communicator is lost."""
    return isinstance(error, MPI.Exception) and error.Get_error_class() in _LOST


def agreed(comm: MPI.Intracomm, *, completed: bool, describe: Callable[[], LongWait] | None = None) -> bool:
    """Whether all members have ``completed`` what they do: the same answer on all that are left.

    Args:
        comm: may be revoked.
        completed: whether this rank has.
        describe: returns the wait for the others.
    """
    return bool(common_bits(comm, int(completed), describe))


def common_bits(comm: MPI.Intracomm, bits: int, describe: Callable[[], LongWait] | None = None) -> int:
    """Returns the bits that all members have set: the same on all that are left; 0 if a member was lost.

    Args:
        comm: may be revoked.
        bits: those of this rank.
        describe: returns the wait for the others.
    """
    common = np.array(bits, np.int32)
    try:
        wait_for(comm.Iagree(common), common, describe=describe)
    except MPI.Exception as error:
        if is_loss(error):
            return 0
        raise
    return int(common)


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
    """Returns what ``make`` makes of a communicator of the members that are left, on all of them.

    Args:
        comm: has lost members.
        make: calls collectives; it is called again, with another communicator, if further members are lost meanwhile.
    """
    while True:
        comm = MPI.Intracomm(comm.Shrink())  # brief, as all have just agreed; Open MPI's Ishrink fails
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        made = unless_lost(partial(make, comm), comm)
        if agreed(comm, completed=made is not None) and made is not None:
            return made
