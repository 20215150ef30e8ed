"""What waiting costs: the CPU time of a rank whose peer comes ten seconds later, for each kind of collective.

    chorosrun -np 2 python benchmarks/waiting/cost.py --seconds 10

Rank 0 waits; also in ``init``, in ``shutdown``, and at the end of the process, where MPI waits for all.
"""

from __future__ import annotations

import argparse
import atexit
import os
import resource
import time
from collections.abc import Callable

import numpy as np

import choros
from choros.comm import Communicator, Reduction, global_process_set


def collectives(communicator: Communicator) -> dict[str, Callable[[], object]]:
    """What rank 0 waits in."""
    small, large = np.ones(1 << 10, np.float32), np.ones(1 << 18, np.float32)
    shared = communicator.empty(1 << 18)
    shared.fill(1)
    return {
        "barrier": communicator.barrier,
        "allreduce, 4 KiB": lambda: communicator.allreduce(small, Reduction.MAX),
        "allreduce, 1 MiB": lambda: communicator.allreduce(large, Reduction.MAX),
        "allreduce in place, 1 MiB": lambda: communicator.allreduce(shared, Reduction.MAX, out=shared),
        "grouped_allreduce": lambda: communicator.grouped_allreduce([small, large], Reduction.MAX),
        "allgather": lambda: communicator.allgather(large),
        "broadcast": lambda: communicator.broadcast(large),
        "reducescatter": lambda: communicator.reducescatter(large, Reduction.MAX),
        "alltoall": lambda: communicator.alltoall(large),
        "allreduce, started": lambda: communicator.start("", communicator.allreduce, large, Reduction.MAX).wait(),
    }


def cpu_seconds() -> float:
    """Of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how much later rank 1 comes")
    seconds = parser.parse_args().seconds
    marks = [cpu_seconds()]
    before = marks[0]
    late = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))) == 1
    if not late:
        # The last to run, as it is the first that is registered.
        atexit.register(
            lambda: print(f"{'end of the process':28}{cpu_seconds() - marks[-1]:8.3f} s of CPU", flush=True)
        )
    if late:
        time.sleep(seconds)
    choros.init()
    communicator = global_process_set.communicator
    if communicator.rank == 0:
        print(f"{'init':28}{cpu_seconds() - before:8.3f} s of CPU, MPI's start included", flush=True)
    for name, collective in collectives(communicator).items():
        communicator.barrier()
        if communicator.rank == 1:
            time.sleep(seconds)
        before, begin = cpu_seconds(), time.perf_counter()
        collective()
        if communicator.rank == 0:
            spent, waited = cpu_seconds() - before, time.perf_counter() - begin
            print(f"{name:28}{spent:8.3f} s of CPU in {waited:.1f} s", flush=True)
    if communicator.rank == 1:
        time.sleep(seconds)
    before = cpu_seconds()
    choros.shutdown()
    if communicator.rank == 0:
        print(f"{'shutdown':28}{cpu_seconds() - before:8.3f} s of CPU", flush=True)
    marks.append(cpu_seconds())
    if late:
        time.sleep(seconds)


if __name__ == "__main__":
    main()
