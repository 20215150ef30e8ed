"""mpi4py: one ``Allreduce`` in place, or one for each chunk of the size in bytes that the command line gives."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from choros.bench.cases import GroupedCase
from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.sum_task import sum_task


def join() -> Prepare:
    """Sums on ``COMM_WORLD``."""
    world = MPI.COMM_WORLD
    chunk_bytes = int(sys.argv[1]) if sys.argv[1:] else None

    def prepare(case: Any) -> Task:
        case = case.joined if isinstance(case, GroupedCase) else case
        array = np.empty(case.items, case.dtype)
        step = len(array) if chunk_bytes is None else max(1, chunk_bytes // array.itemsize)
        chunks = [array[start : start + step] for start in range(0, len(array), step)]

        def reduce() -> list[Any]:
            for chunk in chunks:
                world.Allreduce(MPI.IN_PLACE, chunk, MPI.SUM)
            return [array]

        return sum_task([array], world.Get_size(), reduce)

    return prepare


if __name__ == "__main__":
    serve(join)
