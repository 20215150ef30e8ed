"""choros: ``in-place`` in memory of its engine, as gradients travel, or on ``any-array``, with a new one as result."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import choros
from choros.bench.cases import GroupedCase
from choros.bench.channel import Prepare, Task, serve
from choros.bench.workers.summed import sum_task
from choros.comm import ReduceOp, global_process_set


def main() -> None:
    """Runs the kind that the command line names."""
    (kind,) = sys.argv[1:]
    serve(lambda: {"in-place": in_place, "any-array": any_array}[kind]())


def in_place() -> Prepare:
    """Sums in place; a model's gradients, which are ordinary arrays, as a group."""
    choros.init()
    communicator = global_process_set.communicator
    memory = np.empty(0, np.uint8)

    def prepare(case: Any) -> Task:
        nonlocal memory
        if isinstance(case, GroupedCase):
            arrays = [np.empty(shape, case.dtype) for shape in case.shapes]
            return sum_task(arrays, communicator.size, lambda: communicator.grouped_allreduce(arrays, ReduceOp.SUM))
        needed = case.items * np.dtype(case.dtype).itemsize
        if memory.nbytes < needed:  # it is given back when the job ends
            memory = communicator.empty(needed, np.uint8)
        array = memory[:needed].view(case.dtype)
        return sum_task([array], communicator.size, lambda: [communicator.allreduce(array, ReduceOp.SUM, out=array)])

    return prepare


def any_array() -> Prepare:
    """Sums an ordinary array into a new one; a model's gradients as one array of as many bytes."""
    choros.init()
    communicator = global_process_set.communicator

    def prepare(case: Any) -> Task:
        case = case.joined if isinstance(case, GroupedCase) else case
        array = np.empty(case.items, case.dtype)
        return sum_task([array], communicator.size, lambda: [communicator.allreduce(array, ReduceOp.SUM)])

    return prepare


if __name__ == "__main__":
    main()
