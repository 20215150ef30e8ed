"""Allreduce through shared memory, on one host and on hosts simulated by splitting this one's ranks."""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from choros.comm import Communicator, Reduction, global_process_set
from choros.comm.engines.mpi import MpiCommunicator
from choros.comm.engines.mpi_tuning import Tuning, autotune
from choros.comm.engines.mpi_window import WindowReduction
from choros.errors import ConfigError
from choros.topology import shard_range

SMALL = Tuning(chunk_bytes=4096, window_bytes=64, block_bytes=256)


def of_all_ranks() -> Communicator:
    return global_process_set.communicator


@contextmanager
def on_hosts(*hosts: int, tuning: Tuning = SMALL) -> Iterator[MpiCommunicator]:
    """A communicator of all ranks that treats rank ``i`` as a rank of host ``hosts[i]``."""
    comm = MPI.Intracomm(MPI.COMM_WORLD.Dup())
    host = MPI.Intracomm(comm.Split(hosts[comm.Get_rank()], comm.Get_rank()))
    communicator = MpiCommunicator(comm, tuning, host)
    yield communicator
    communicator.close()


def layouts() -> list[tuple[int, ...]]:
    size = MPI.COMM_WORLD.Get_size()
    together, apart = (0,) * size, tuple(range(size))
    return [together, apart, *([(0, 0, 1), (0, 1, 1), (0, 1, 0)] if size == 3 else [])]


def values(rank: int, items: int, dtype: str) -> np.ndarray:
    return ((np.arange(items) * 7 + rank * 3) % 5 + 1).astype(dtype)


def case_shared_memory_and_messages_have_the_same_results() -> None:
    ops = {Reduction.SUM: np.add, Reduction.MIN: np.minimum, Reduction.MAX: np.maximum, Reduction.PRODUCT: np.multiply}
    for hosts in layouts():
        with on_hosts(*hosts) as communicator:
            for items in (0, 1, 2, 17, 1000, 5000):
                for dtype in ("float32", "int64", "float16", "bool", "uint8"):
                    for op, ufunc in ops.items():
                        ranks = [values(rank, items, dtype) for rank in range(communicator.size)]
                        got = communicator.allreduce(ranks[communicator.rank], op)
                        expected = ufunc.reduce(ranks).astype(dtype)
                        np.testing.assert_array_equal(got, expected, err_msg=f"{hosts} {items} {dtype} {op}")


def case_array_in_shared_memory_is_reduced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    allreduce = WindowReduction.allreduce

    def noted(window: WindowReduction, buffer: NDArray[Any], op: Reduction) -> None:
        reduced.append(buffer.nbytes)
        allreduce(window, buffer, op)

    monkeypatch.setattr(WindowReduction, "allreduce", noted)
    for hosts in layouts():
        reduced.clear()
        with on_hosts(*hosts) as communicator:
            array = communicator.empty((40, 30), np.float64)
            for step in range(3):
                array[...] = communicator.rank + step
                assert communicator.allreduce(array, out=array) is array
                np.testing.assert_array_equal(array, (communicator.size - 1) / 2 + step)
            part = array[10:20]
            part[...] = 1
            communicator.allreduce(part, Reduction.SUM, out=part)
            assert reduced == ([array.nbytes] * 3 + [part.nbytes] if max(map(hosts.count, hosts)) > 1 else [])
            assert float(array.sum()) == 30 * (30 * ((communicator.size - 1) / 2 + 2) + 10 * communicator.size)


def case_a_rank_without_shared_memory() -> None:
    for hosts in layouts():
        with on_hosts(*hosts) as communicator:
            before = communicator.empty(50_000)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if communicator.rank == communicator.size - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
            try:
                after = communicator.empty(100_000)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            for array in (before, after, np.empty(70_000)):
                array.fill(1)
                assert (communicator.allreduce(array, Reduction.SUM, out=array) == communicator.size).all()


def case_result_is_written_to_out() -> None:
    communicator = of_all_ranks()
    source, out = np.full((3, 4), 1.5 + communicator.rank), np.empty((3, 4))
    assert communicator.allreduce(source, Reduction.MAX, out=out) is out
    np.testing.assert_array_equal(out, 0.5 + communicator.size)
    assert source[0, 0] == 1.5 + communicator.rank


def case_large_and_small_arrays_in_place() -> None:
    for hosts in layouts():
        with on_hosts(*hosts, tuning=Tuning()) as communicator:
            total = communicator.size * (communicator.size + 1) / 2
            for op, expected in ((Reduction.SUM, total), (Reduction.AVERAGE, total / communicator.size)):
                arrays = [np.full(items, 1.0 + communicator.rank) for items in (3, 70_000, 0, 8, 1_200_000)]
                integers = np.full(90_000, 1 + communicator.rank)
                results = communicator.grouped_allreduce([*arrays, integers], op, out=[*arrays, integers])
                for array, result in zip([*arrays, integers], results, strict=True):
                    assert result is array
                    np.testing.assert_array_equal(array, np.full_like(array, expected))
            with pytest.raises(ConfigError, match="out has 1 arrays: expected one for each of the 2"):
                communicator.grouped_allreduce([np.ones(2), np.ones(2)], out=[np.ones(2)])
            registered = communicator.empty(90_000, np.float64)  # on one rank the result is in shared memory
            out = registered if communicator.rank == 0 else np.empty(90_000)
            communicator.allreduce(np.full(90_000, 1.0 + communicator.rank), Reduction.SUM, out=out)
            np.testing.assert_array_equal(out, total)


def case_a_nan_of_a_large_array_is_its_extreme() -> None:
    for hosts in layouts():
        with on_hosts(*hosts) as communicator:
            array = np.ones(120_000, np.float32)
            if communicator.rank == 0:
                array[::2] = np.nan
            for op in (Reduction.MIN, Reduction.MAX):
                for reduced in (communicator.allreduce(array, op), communicator.reducescatter(array, op)):
                    np.testing.assert_array_equal(reduced, np.resize([np.nan, 1], len(reduced)))


def case_all_ranks_have_the_same_bits() -> None:
    size = MPI.COMM_WORLD.Get_size()
    for hosts in layouts():
        with on_hosts(*hosts) as communicator:
            array = np.random.default_rng(communicator.rank).normal(size=3001).astype(np.float32)
            sums = communicator.allgather(communicator.allreduce(array, Reduction.SUM)).reshape(size, -1)
            assert (sums == sums[0]).all()


def case_sums_are_in_the_order_of_the_ranks_however_messages_are_cut() -> None:
    size, together = MPI.COMM_WORLD.Get_size(), (0,) * MPI.COMM_WORLD.Get_size()
    ranks = [np.random.default_rng(rank).normal(size=(601, 5)).astype(np.float32) for rank in range(size)]
    expected = functools.reduce(np.add, ranks)
    for chunk_bytes in (512, 4096, 1 << 20):
        with on_hosts(*together, tuning=replace(SMALL, chunk_bytes=chunk_bytes)) as communicator:
            own = ranks[communicator.rank]
            whole, (first, _) = communicator.allreduce(own, Reduction.SUM), shard_range(601, communicator.rank, size)
            rows = communicator.reducescatter(own, Reduction.SUM)
            registered = communicator.empty(own.shape)
            np.copyto(registered, own)
            communicator.allreduce(registered, Reduction.SUM, out=registered)
            for got, right in ((whole, expected), (rows, expected[first:]), (registered, expected)):
                np.testing.assert_array_equal(got, right[: len(got)])


def case_messages_of_all_sizes_follow_each_other() -> None:
    """What one rank still reads of a message, another does not write."""
    generator = np.random.default_rng(7)
    for hosts in layouts():
        with on_hosts(*hosts) as communicator:
            for _ in range(60):
                arrays = [np.full(int(items), 1.0 + communicator.rank) for items in generator.integers(0, 1500, 4)]
                if communicator.rank == generator.integers(communicator.size):
                    time.sleep(0.001)
                total = communicator.size * (communicator.size + 1) / 2
                for array in communicator.grouped_allreduce(arrays, Reduction.SUM):
                    assert (array == total).all()
                for array in communicator.grouped_reducescatter([*arrays, np.ones(3, np.int32)], Reduction.SUM):
                    assert (array == (total if array.dtype == np.float64 else communicator.size)).all()


def case_subsets_of_ranks_have_separate_memory() -> None:
    everyone = of_all_ranks()
    array = everyone.empty(10000)
    part = everyone.split([0, everyone.size - 1])
    array.fill(1)
    if part is not None:
        inner = part.empty(10000)
        inner.fill(2)
        part.allreduce(inner, Reduction.SUM, out=inner)
        assert (inner == 2 * part.size).all()
        part.close()
    everyone.allreduce(array, Reduction.SUM, out=array)
    assert (array == everyone.size).all()


def case_autotune_chooses_the_same_on_every_rank() -> None:
    communicator = of_all_ranks()
    assert isinstance(communicator, MpiCommunicator)
    measurements, tuning = autotune(communicator, megabytes=1), communicator.tuning
    assert {each.chunk_bytes for each, _, _ in measurements} > {tuning.chunk_bytes}
    measurements = autotune(communicator, megabytes=1, keep_chunks=True)
    assert {each.chunk_bytes for each, _, _ in measurements} == {tuning.chunk_bytes}
    tuning = communicator.tuning
    chosen = [tuning.chunk_bytes, tuning.window_bytes, tuning.block_bytes]
    np.testing.assert_array_equal(communicator.allreduce(np.array(chosen), Reduction.MAX), chosen)
    np.testing.assert_array_equal(communicator.allreduce(np.array(chosen), Reduction.MIN), chosen)
    array = np.full(1 << 20, 1.0, np.float32)
    assert (communicator.allreduce(array, Reduction.SUM) == communicator.size).all()


def case_memory_does_not_grow() -> None:
    communicator = of_all_ranks()
    array, registered = np.ones(30000, np.float32), communicator.empty(30000)
    registered.fill(1)

    def reduce(times: int) -> int:
        for _ in range(times):
            communicator.allreduce(array)
            communicator.allreduce(registered, out=registered)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = reduce(500)
    assert reduce(4500) - before < 2000, "kilobytes more after 9,000 further allreduces"


def case_a_gibibyte() -> None:
    communicator = of_all_ranks()
    array = np.full(1 << 28, 1.0 + communicator.rank, np.float32)
    communicator.allreduce(array, Reduction.SUM, out=array)
    size = communicator.size
    assert array[0] == array[-1] == array[1 << 27] == size * (size + 1) / 2
