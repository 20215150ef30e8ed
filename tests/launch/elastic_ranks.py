"""Ranks of an elastic job that use MPI alone: they go on without one that dies, and start another in its place."""

import json
import os
import signal
import sys
import threading
import time

import mpi4py
import numpy as np

mpi4py.rc.thread_level = "multiple"

from mpi4py import MPI  # noqa: E402  (after the thread level)

STEPS = 8
#: MPI may still write into the buffers of a collective that has failed.
KEPT = []


def step(comm):
    ones, total = np.ones(1), np.zeros(1)
    request = comm.Iallreduce(ones, total)
    KEPT.append((ones, total, request))
    while not request.Test():
        time.sleep(0.001)
    comm.Agree(1)
    return int(total[0])


def shrunk(comm):
    comm.Revoke()
    comm = comm.Shrink()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def replaced(comm, place):
    """The communicator with a further rank, which rank 0 starts while the others wait for it."""
    pair = comm
    if comm.rank == 0:
        argv = [item.replace("{new_rank}", f"{place},0,0,0,0") for item in json.loads(os.environ["CHOROS_SPAWN"])]
        started = []
        thread = threading.Thread(target=lambda: started.append(MPI.COMM_SELF.Spawn(argv[0], argv[1:])))
        thread.start()
        thread.join()
        pair = started[0].Merge(high=False)
    return comm.Create_intercomm(0, pair, 1, 7).Merge(high=False)


def joined():
    pair = MPI.Comm.Get_parent().Merge(high=True)
    return MPI.COMM_WORLD.Create_intercomm(0, pair, 0, 7).Merge(high=True)


def main(victims, replaces):
    place = os.environ["HOROVOD_RANK"]
    print("ready", f"job={os.environ['CHOROS_JOB']}", flush=True)
    if MPI.Comm.Get_parent() != MPI.COMM_NULL:
        comm, victims = joined(), []
        print("joined in the place of", place, flush=True)
    else:
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    done = 0  # of those that this communicator has made
    while done < STEPS:
        if done == 2 and place in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            size = step(comm)
        except MPI.Exception:
            comm = shrunk(comm)
            if replaces:
                comm = replaced(comm, int(victims[0]))
                done = 0
            continue
        done += 1
    print("finished with", size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), "replace" in sys.argv)
