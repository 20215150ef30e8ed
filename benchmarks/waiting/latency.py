"""How long an allreduce takes: arrays of three sizes, in place in shared memory and from anywhere.

    chorosrun -np 2 python benchmarks/waiting/latency.py --label mine

Two versions are compared by starting this in turns with the one and with the other on ``PYTHONPATH``, and taking the
best and the median of the lines of each.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import choros
from choros.comm import Reduction, global_process_set

#: Bytes, and how many allreduces are timed together.
SIZES = {4 << 10: 1000, 1 << 20: 200, 16 << 20: 20}
ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="choros")
    label = parser.parse_args().label
    choros.init()
    communicator = global_process_set.communicator
    fields = []
    for nbytes, times in SIZES.items():
        anywhere = np.ones(nbytes // 4, np.float32)
        shared = communicator.empty(nbytes // 4)
        shared.fill(1)
        for array in (anywhere, shared):
            rounds = []
            for _ in range(ROUNDS):
                communicator.barrier()
                begin = time.perf_counter()
                for _ in range(times):
                    communicator.allreduce(array, Reduction.MAX, out=array)
                rounds.append((time.perf_counter() - begin) / times * 1e6)
            where = "in place" if array is shared else "copied"
            fields.append(f"{nbytes >> 10} KiB {where} {min(rounds):.1f} {sorted(rounds)[ROUNDS // 2]:.1f}")
    if communicator.rank == 0:
        print(f"{label}: " + "; ".join(fields), flush=True)


if __name__ == "__main__":
    main()
