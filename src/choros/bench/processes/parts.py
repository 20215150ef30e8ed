"""choros: the parts of a step's communication, one by one, on the CNN's gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import choros
from choros.bench.cases import CNN_SHAPES
from choros.bench.channel import Prepare, Task, serve
from choros.comm import Reduction, global_process_set
from choros.parallel.reduce.reducer import GradientReducer, ReduceConfig


def join() -> Prepare:
    """Creates the gradients and the fusion buffer in which they are sent."""
    choros.init()
    communicator = global_process_set.communicator
    gradients = [np.ones(shape, np.float32) for shape in CNN_SHAPES]
    results = [np.empty_like(gradient) for gradient in gradients]
    ends = np.cumsum([math.prod(shape) for shape in CNN_SHAPES])
    buffer = communicator.empty(int(ends[-1]))
    segments = [part.reshape(shape) for part, shape in zip(np.split(buffer, ends[:-1]), CNN_SHAPES, strict=True)]
    reducer = GradientReducer(ReduceConfig())

    def copy(targets: list[Any], sources: list[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    parts = {
        "control message": communicator.barrier,
        "pack": lambda: copy(segments, gradients),
        "allreduce": lambda: communicator.allreduce(buffer, Reduction.SUM, out=buffer),
        "unpack": lambda: copy(results, segments),
        "all, by the reducer": lambda: reducer.reduce(gradients, examples=1),
    }

    def rewrite() -> None:
        for array in (*gradients, buffer):
            array.fill(1)

    def prepare(case: Any) -> Task:
        act = parts[case.part]

        def run(units: int) -> None:
            for _ in range(units):
                act()

        return Task(run, before=rewrite)

    return prepare


if __name__ == "__main__":
    serve(join)
