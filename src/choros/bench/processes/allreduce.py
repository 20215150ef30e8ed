"""Sums: what each library does for a case of ``choros bench allreduce``, and the parts of a step of choros."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from choros.bench.cases import CNN_SHAPES
from choros.bench.channel import Prepare, Task, serve_one_of
from choros.comm import Communicator, Reduction


def sum_task(arrays: Sequence[Any], size: int, reduce: Callable[[], Sequence[Any]]) -> Task:
    """Returns the task of summing ``arrays`` over ``size`` ranks; ``reduce`` sums them and returns the results.
    Each rank writes its arrays before each run, as a backward pass does: data another core still caches cost more.
    """
    results: list[Any] = []
    fills = [array.fill_ if hasattr(array, "fill_") else array.fill for array in arrays]

    def run(units: int) -> None:
        for _ in range(units):
            results[:] = reduce()

    def before() -> None:
        for fill in fills:
            fill(1)

    def check() -> None:
        for result in results:
            if not bool((result == size).all()):
                raise ArithmeticError(f"wrong result: a sum of ones over {size} ranks has elements other than {size}")

    return Task(run, before, check)


def in_place() -> Prepare:
    """choros: in memory of its engine, like gradients; a model's, which are ordinary arrays, into new ones."""
    communicator = _communicator()
    memory = np.empty(0, np.uint8)

    def empty(items: int, dtype: str) -> Any:
        nonlocal memory
        needed = items * np.dtype(dtype).itemsize
        if memory.nbytes < needed:  # released when the job ends
            memory = communicator.empty(needed, np.uint8)
        return memory[:needed].view(dtype)

    return _by_choros(communicator, empty, into_new=True)


def any_array() -> Prepare:
    """choros: ordinary arrays, in place."""
    return _by_choros(_communicator(), np.empty, into_new=False)


def _by_choros(communicator: Communicator, empty: Callable[[int, str], Any], *, into_new: bool) -> Prepare:
    """``empty`` makes a single array; a model's are summed in place, or ``into_new`` ones."""

    def prepare(case: Any) -> Task:
        if case.shapes:
            arrays = [np.empty(shape, case.dtype) for shape in case.shapes]
            out = None if into_new else arrays
            reduce = partial(communicator.grouped_allreduce, arrays, Reduction.SUM, out=out)
            return sum_task(arrays, communicator.size, reduce)
        array = empty(case.items, case.dtype)
        return sum_task([array], communicator.size, lambda: [communicator.allreduce(array, Reduction.SUM, out=array)])

    return prepare


def mpi4py(chunk_bytes: str = "") -> Prepare:
    """mpi4py: one ``Allreduce`` in place on ``COMM_WORLD``, or one for each chunk."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def prepare(case: Any) -> Task:
        array = np.empty(case.items, case.dtype)
        step = max(1, int(chunk_bytes) // array.itemsize) if chunk_bytes else len(array)
        chunks = [array[start : start + step] for start in range(0, len(array), step)]

        def reduce() -> list[Any]:
            for chunk in chunks:
                world.Allreduce(MPI.IN_PLACE, chunk, MPI.SUM)
            return [array]

        return sum_task([array], world.Get_size(), reduce)

    return prepare


def gloo() -> Prepare:
    """PyTorch: ``torch.distributed.all_reduce`` on Gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def reduce(tensor: Any) -> Any:
        dist.all_reduce(tensor)
        return tensor

    return _of_tensors(dist.get_world_size(), reduce)


def horovod() -> Prepare:
    """Horovod: ``hvd.allreduce_`` of a torch tensor."""
    import horovod.torch as hvd

    hvd.init()
    return _of_tensors(hvd.size(), lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name="bench"))


def memcpy() -> Prepare:
    """A memcpy on every rank, without communication: the lower bound of the time to sum two arrays."""

    def prepare(case: Any) -> Task:
        source = np.empty(case.items, case.dtype)
        target = np.zeros_like(source)
        return _repeated(lambda: np.copyto(target, source), before=lambda: source.fill(1))

    return prepare


def parts() -> Prepare:
    """choros: the parts of a step's communication, one by one, on the CNN's gradients and their fusion buffer."""
    from choros.parallel.reduce.plan import ReduceConfig
    from choros.parallel.reduce.reducer import GradientReducer

    communicator = _communicator()
    gradients = [np.ones(shape, np.float32) for shape in CNN_SHAPES]
    results = [np.empty_like(gradient) for gradient in gradients]
    ends = np.cumsum([math.prod(shape) for shape in CNN_SHAPES])
    buffer = communicator.empty(int(ends[-1]))
    segments = [part.reshape(shape) for part, shape in zip(np.split(buffer, ends[:-1]), CNN_SHAPES, strict=True)]
    reducer = GradientReducer(ReduceConfig())

    def copy(targets: list[Any], sources: list[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    acts: dict[str, Callable[[], object]] = {
        "control message": communicator.barrier,
        "pack": lambda: copy(segments, gradients),
        "allreduce": lambda: communicator.allreduce(buffer, Reduction.SUM, out=buffer),
        "unpack": lambda: copy(results, segments),
        "all, by the reducer": lambda: reducer.reduce(gradients, examples=1),
    }

    def rewrite() -> None:
        for array in (*gradients, buffer):
            array.fill(1)

    return lambda part: _repeated(acts[part], before=rewrite)


def _communicator() -> Communicator:
    import choros

    choros.init()
    communicator: Communicator = choros.global_process_set.communicator
    return communicator


def _of_tensors(size: int, reduce: Callable[[Any], Any]) -> Prepare:
    import torch

    def prepare(case: Any) -> Task:
        tensor = torch.empty(case.items, dtype=getattr(torch, case.dtype))
        return sum_task([tensor], size, lambda: [reduce(tensor)])

    return prepare


def _repeated(act: Callable[[], object], before: Callable[[], object]) -> Task:
    def run(units: int) -> None:
        for _ in range(units):
            act()

    return Task(run, before)


if __name__ == "__main__":
    serve_one_of(in_place, any_array, mpi4py, gloo, horovod, memcpy, parts)
