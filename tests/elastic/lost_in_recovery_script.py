"""Rank 3 is killed, and rank 1 in the recovery from that, while Open MPI makes the communicator that the argument says:
the first, the second or the third. All others have taken part in agreeing on it by then, and wait for rank 1.
"""

import atexit
import ctypes
import os
import signal
import sys

import numpy as np
from mpi4py import MPI

import choros
from choros.comm import Reduction, global_process_set

# mpi4py, which is imported before choros, would end MPI after this if it had not ended, and wait for the lost ranks.
atexit.register(lambda: print(f"rank {number}: MPI has ended: {MPI.Is_finalized()}", flush=True))
choros.init()
communicator, ones = global_process_set.communicator, np.ones(300_000, np.float32)
number, nth = communicator.rank, int(sys.argv[1])
made = 0
library = ctypes.CDLL(MPI.__file__)  # finds the symbols of libmpi, too
AddComm = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
add_comm = AddComm(ctypes.cast(library.mca_pml_ob1_add_comm, ctypes.c_void_p).value)


@AddComm
def die_in_the_nth(comm):
    global made
    made += 1
    if made == nth:
        os.kill(os.getpid(), signal.SIGKILL)
    return add_comm(comm)


communicator.allreduce(ones, Reduction.SUM)
if number == 1:  # what makes a communicator known to Open MPI's messages is an entry of this table
    table = (ctypes.c_void_p * 16).from_address(ctypes.addressof(ctypes.c_char.in_dll(library, "mca_pml")))
    table[table[:].index(ctypes.cast(add_comm, ctypes.c_void_p).value)] = ctypes.cast(die_in_the_nth, ctypes.c_void_p)
elif number == 3:
    os.kill(os.getpid(), signal.SIGKILL)
total = communicator.allreduce(ones, Reduction.SUM)
print(f"rank {number}: {communicator.launched} left, {total[0]}", flush=True)
