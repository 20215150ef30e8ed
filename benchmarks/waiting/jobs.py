"""Whether jobs that share their cores starve each other: ten jobs of two ranks, in a row and then at once.

    taskset -c 0,1 python benchmarks/waiting/jobs.py --jobs 10

Each job computes and reduces in turns, as a training step does: every rank computes for some milliseconds of CPU time,
then 4 KiB and 1 MiB are reduced. Prints the seconds of both, and their ratio: 1 is what the same work costs at best.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))


def work(steps: int, milliseconds: float) -> None:
    """What each rank does."""
    import choros
    from choros.comm import Reduction, global_process_set

    choros.init()
    communicator = global_process_set.communicator
    small, large = np.ones(1 << 10, np.float32), np.ones(1 << 18, np.float32)
    matrix = np.ones((200, 200), np.float32)
    for _ in range(steps):
        begin = time.thread_time()
        while time.thread_time() - begin < milliseconds / 1000:
            np.tanh(matrix, out=matrix)
        communicator.allreduce(small, Reduction.MAX)
        communicator.allreduce(large, Reduction.MAX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--milliseconds", type=float, default=5.0, help="computing in each step")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.steps, arguments.milliseconds)
        return
    options = ["--steps", str(arguments.steps), "--milliseconds", str(arguments.milliseconds)]
    command = [CHOROSRUN, "-np", "2", sys.executable, __file__, "--work", *options]
    begin = time.perf_counter()
    for _ in range(arguments.jobs):
        subprocess.run(command, check=True)
    in_a_row = time.perf_counter() - begin
    begin = time.perf_counter()
    jobs = [subprocess.Popen(command) for _ in range(arguments.jobs)]
    codes = [job.wait() for job in jobs]
    at_once = time.perf_counter() - begin
    if any(codes):
        sys.exit(f"jobs ended with {codes}")
    print(f"{arguments.jobs} jobs: {in_a_row:.1f} s in a row, {at_once:.1f} s at once, ratio {at_once / in_a_row:.2f}")


if __name__ == "__main__":
    main()
