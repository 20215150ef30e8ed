"""Rank 1 is killed and replaced; the rank that the first argument says, ``new`` for the new one, gets the signal of the
second, SIGKILL without one, when the others are in MPI's Merge with it: that does not end, except, with a third
argument, on rank 0. A job that is started again ends, and so does a rank that is the only one left.
"""

import os
import signal
import sys

from mpi4py import MPI

import choros
from choros import comm
from choros.comm import Reduction
from choros.comm.engines import mpi, mpi_admission

new_rank = os.environ.get("CHOROS_NEW_RANK")
choros.init()
number = "new" if new_rank else str(choros.rank())


def die(members, pair, *, is_new):
    members.Create_intercomm(0, pair or members, 0 if is_new else 1, mpi_admission._JOIN)
    os.kill(os.getpid(), signal.Signals[(sys.argv[2:] or ["SIGKILL"])[0]])


def notice(members, pair, *, is_new):
    members.Create_intercomm(0, pair or members, 0 if is_new else 1, mpi_admission._JOIN)
    raise MPI.Exception(MPI.ERR_PROC_FAILED)


if number == sys.argv[1]:
    mpi.joined = die
elif number == "0" and sys.argv[3:]:
    mpi.joined = notice
communicator = comm.global_process_set.communicator
with comm.opening():
    if new_rank:
        comm.admit()
    for step in range(5 if os.environ.get("CHOROS_RESTARTS", "0") != "0" else 1_000_000):
        if (number, step) == ("1", 5):
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.allreduce(1.0, Reduction.SUM)
        comm.admit()
        if communicator.size == 1:
            break
