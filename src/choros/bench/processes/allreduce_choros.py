"""choros: ``in-place`` in memory of its engine, like gradients, or from ``any-array`` into a new one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import choros
from choros.bench.cases import GroupedCase
from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.sum_task import sum_task
from choros.comm import Reduction, global_process_set


def main() -> None:
    """Serves the variant that the command line names."""
    (kind,) = sys.argv[1:]
    serve(lambda: {"in-place": in_place, "any-array": any_array}[kind]())


def in_place() -> Prepare:
    """Sums in place; a model's gradients, which are ordinary arrays, by a grouped allreduce."""
    choros.init()
    communicator = global_process_set.communicator
    memory = np.empty(0, np.uint8)

    def prepare(case: Any) -> Task:
        nonlocal memory
        if isinstance(case, GroupedCase):
            arrays = [np.empty(shape, case.dtype) for shape in case.shapes]
            return sum_task(arrays, communicator.size, lambda: communicator.grouped_allreduce(arrays, Reduction.SUM))
        needed = case.items * np.dtype(case.dtype).itemsize
        if memory.nbytes < needed:  # released when the job ends
            memory = communicator.empty(needed, np.uint8)
        array = memory[:needed].view(case.dtype)
        return sum_task([array], communicator.size, lambda: [communicator.allreduce(array, Reduction.SUM, out=array)])

    return prepare


def any_array() -> Prepare:
    """Sums an ordinary array into a new one; a model's gradients as one array of the same size."""
    choros.init()
    communicator = global_process_set.communicator

    def prepare(case: Any) -> Task:
        case = case.joined if isinstance(case, GroupedCase) else case
        array = np.empty(case.items, case.dtype)
        return sum_task([array], communicator.size, lambda: [communicator.allreduce(array, Reduction.SUM)])

    return prepare


if __name__ == "__main__":
    main()
