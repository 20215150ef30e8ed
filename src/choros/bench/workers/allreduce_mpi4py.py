"""mpi4py: one ``Allreduce`` in place, or with a number of bytes on the command line, in pieces of so many."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from choros.bench.cases import GroupedCase
from choros.bench.channel import Prepare, Task, serve
from choros.bench.workers.summed import sum_task


def join() -> Prepare:
    """Sums on ``COMM_WORLD``."""
    world = MPI.COMM_WORLD
    piece_bytes = int(sys.argv[1]) if sys.argv[1:] else None

    def prepare(case: Any) -> Task:
        case = case.joined if isinstance(case, GroupedCase) else case
        array = np.empty(case.items, case.dtype)
        step = len(array) if piece_bytes is None else max(1, piece_bytes // array.itemsize)
        pieces = [array[start : start + step] for start in range(0, len(array), step)]

        def reduce() -> list[Any]:
            for piece in pieces:
                world.Allreduce(MPI.IN_PLACE, piece, MPI.SUM)
            return [array]

        return sum_task([array], world.Get_size(), reduce)

    return prepare


if __name__ == "__main__":
    serve(join)
