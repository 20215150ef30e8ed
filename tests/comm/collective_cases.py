"""Results of every collective, for any engine, dtype, shape and number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from choros.comm import BFLOAT16, Communicator, Reduction
from choros.comm.reduction import DTYPES
from choros.errors import ConfigError
from choros.topology import shard_range

Array = NDArray
SHAPES = [(), (0,), (3, 0), (5,), (2, 3, 4)]
#: One for each way to convert a dtype to the one it is reduced in.
KINDS = [np.dtype(np.float32), np.dtype(np.bool_), BFLOAT16]


def values(rank: int, dtype: np.dtype, shape: tuple[int, ...] = (5,)) -> Array:
    """Small whole numbers that differ between ranks: they and their reductions are exact in every dtype."""
    return ((np.arange(math.prod(shape)) + 3 * rank) % 4).reshape(shape).astype(dtype)


def values_of_all(communicator: Communicator, dtype: np.dtype, shape: tuple[int, ...] = (5,)) -> list[Array]:
    return [values(rank, dtype, shape) for rank in range(communicator.size)]


def reduced(arrays: list[Array], op: Reduction) -> Array:
    """The expected result: computed in float64, with 0 and 1 for booleans, and rounded to the dtype."""
    function = {
        Reduction.AVERAGE: np.mean,
        Reduction.SUM: np.sum,
        Reduction.MIN: np.min,
        Reduction.MAX: np.max,
        Reduction.PRODUCT: np.prod,
    }[op]
    return np.asarray(function(np.stack(arrays).astype(np.float64), axis=0)).astype(arrays[0].dtype)


def operations(dtype: np.dtype) -> list[Reduction]:
    refused = [Reduction.ADASUM, *([Reduction.AVERAGE] if dtype == np.bool_ else [])]
    return [op for op in Reduction if op not in refused]


def check_same(result: Array, expected: Array, *what: object) -> None:
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), what
    np.testing.assert_array_equal(result, expected, err_msg=str(what))


def case_allreduce_combines_every_dtype_with_every_operation(communicator: Communicator) -> None:
    for dtype in DTYPES:
        arrays = values_of_all(communicator, dtype)
        for op in operations(dtype):
            check_same(communicator.allreduce(arrays[communicator.rank], op), reduced(arrays, op), dtype, op)


def case_allreduce_keeps_the_shape(communicator: Communicator) -> None:
    for dtype in KINDS:
        for shape in SHAPES:
            arrays = values_of_all(communicator, dtype, shape)
            result = communicator.allreduce(arrays[communicator.rank], Reduction.SUM)
            check_same(result, reduced(arrays, Reduction.SUM), dtype, shape)


def case_arrays_may_have_any_memory_layout(communicator: Communicator) -> None:
    def scattered(rank: int, dtype: np.dtype) -> Array:
        return values(rank, dtype, (6, 4, 5))[::2, ::-1].transpose(2, 0, 1)

    for dtype in KINDS:
        arrays = [scattered(rank, dtype) for rank in range(communicator.size)]
        mine = arrays[communicator.rank]
        check_same(communicator.allreduce(mine, Reduction.MAX), reduced(arrays, Reduction.MAX), dtype)
        check_same(communicator.allgather(mine), np.concatenate(arrays), dtype)
        check_same(communicator.broadcast(mine), arrays[0], dtype)
        start, end = shard_range(5, communicator.rank, communicator.size)
        check_same(communicator.reducescatter(mine, Reduction.MAX), reduced(arrays, Reduction.MAX)[start:end], dtype)
        splits = [1] * communicator.size
        rows = np.stack([array[communicator.rank] for array in arrays])
        check_same(communicator.alltoall(mine, splits)[0], rows, dtype)


def case_a_minimum_or_maximum_with_a_nan_is_one_whichever_rank_has_it(communicator: Communicator) -> None:
    size, nans = communicator.size, {Reduction.MIN: np.nan, Reduction.MAX: -np.nan}
    for dtype, op, rank, items in itertools.product((np.float16, np.float32, np.float64), nans, range(size), (1, 5000)):
        own = np.full(items, communicator.rank - 1.5, dtype)
        if communicator.rank == rank:
            own[::2] = nans[op]
        expected = np.full(items, -1.5 if op is Reduction.MIN else size - 2.5, dtype)
        expected[::2] = np.nan
        check_same(communicator.allreduce(own, op), expected, op, rank)


def case_inputs_are_only_read_and_results_are_writable(communicator: Communicator) -> None:
    array = np.ones((communicator.size, 2), np.float32)
    array.setflags(write=False)
    for result in (
        communicator.allreduce(array),
        communicator.allgather(array),
        communicator.broadcast(array),
        communicator.reducescatter(array),
        communicator.alltoall(array)[0],
    ):
        result += 1


def case_average_of_integers_rounds_towards_zero(communicator: Communicator) -> None:
    mine = np.array([7, -7, 0]) + (communicator.rank == 0) * np.array([1, -1, 0])
    average = (7 * communicator.size + 1) // communicator.size
    for dtype in (np.int8, np.int64):
        check_same(communicator.allreduce(mine.astype(dtype)), np.array([average, -average, 0], dtype))


def case_booleans_have_no_average(communicator: Communicator) -> None:
    with pytest.raises(ConfigError, match="op=Max for 'any'"):
        communicator.allreduce(True, Reduction.AVERAGE)


def case_bfloat16_is_summed_in_float32(communicator: Communicator) -> None:
    # Its numbers from 256 on are 2 apart: in bfloat16, 256 + 1 + 1 would remain 256.
    mine = np.full(3, 256 if communicator.rank == 0 else 1, BFLOAT16)
    total = np.full(3, 256 + communicator.size - 1, np.float32).astype(BFLOAT16)
    check_same(communicator.allreduce(mine, Reduction.SUM), total)
    start, end = shard_range(3, communicator.rank, communicator.size)
    check_same(communicator.reducescatter(mine, Reduction.SUM), total[start:end])


def case_grouped_allreduce_takes_arrays_of_many_kinds(communicator: Communicator) -> None:
    arrays = [[values(rank, dtype, shape) for dtype, shape in zip(KINDS, SHAPES, strict=False)] for rank in (0, 1, 2)]
    results = communicator.grouped_allreduce(arrays[communicator.rank], Reduction.SUM)
    for result, *parts in zip(results, *arrays[: communicator.size], strict=True):
        check_same(result, reduced(parts, Reduction.SUM))
    assert communicator.grouped_allreduce([]) == []


def case_allgather_concatenates_rows_of_which_some_ranks_have_none(communicator: Communicator) -> None:
    for dtype in DTYPES:
        for inner in ((), (2,), (2, 0)):
            arrays = [values(rank, dtype, (2 * rank, *inner)) for rank in range(communicator.size)]
            check_same(communicator.allgather(arrays[communicator.rank]), np.concatenate(arrays), dtype, inner)


def case_allgather_treats_a_scalar_as_one_row(communicator: Communicator) -> None:
    check_same(communicator.allgather(np.float32(communicator.rank)), np.arange(communicator.size, dtype=np.float32))


def case_grouped_allgather_takes_arrays_of_many_kinds_and_lengths(communicator: Communicator) -> None:
    def arrays(rank: int, rows: int) -> list[Array]:
        kinds = zip(DTYPES, itertools.cycle([(), (2,), (2, 0)]), strict=False)
        return [values(rank, dtype, (rows + index % 3, *inner)) for index, (dtype, inner) in enumerate(kinds)]

    for length in (lambda rank: 2, lambda rank: 3 * rank):  # the same on all ranks, and different
        of_ranks = [[*arrays(rank, length(rank)), np.float32(rank)] for rank in range(communicator.size)]
        results = communicator.grouped_allgather(of_ranks[communicator.rank])
        for result, *parts in zip(results, *of_ranks, strict=True):
            check_same(result, np.concatenate([np.atleast_1d(part) for part in parts]))
    assert communicator.grouped_allgather([]) == []


def case_grouped_reducescatter_takes_arrays_of_many_kinds(communicator: Communicator) -> None:
    def arrays(rank: int) -> list[Array]:
        return [values(rank, dtype, (3 + index % 4, 2)) for index, dtype in enumerate([*DTYPES, *DTYPES])]

    of_ranks = [arrays(rank) for rank in range(communicator.size)]
    for op in (Reduction.SUM, Reduction.MAX):
        results = communicator.grouped_reducescatter(of_ranks[communicator.rank], op)
        for result, *parts in zip(results, *of_ranks, strict=True):
            start, end = shard_range(len(parts[0]), communicator.rank, communicator.size)
            check_same(result, reduced(parts, op)[start:end])
    assert communicator.grouped_reducescatter([]) == []


def case_groups_are_sent_in_few_messages(communicator: Communicator) -> None:
    size, sent = communicator.size, []
    arrays = [np.full((size, 3), communicator.rank, np.float32)] * 5
    with pytest.MonkeyPatch.context() as patch:

        def count(name: str, call: Callable) -> None:
            patch.setattr(communicator, name, lambda *args: sent.append(name) or call(*args))

        count("_allgather", communicator._allgather)
        count("_reducescatter_into", communicator._reducescatter_into)
        for chunk_bytes, messages in ((communicator.chunk_bytes, 1), (arrays[0].nbytes, 5)):
            patch.setattr(communicator, "chunk_bytes", chunk_bytes)
            sent.clear()
            for rows in communicator.grouped_allgather(arrays):
                check_same(rows[:, 0], np.repeat(np.arange(size), size).astype(np.float32))
            for rows in communicator.grouped_reducescatter(arrays, Reduction.MAX):
                check_same(rows, np.full((1, 3), size - 1, np.float32))
            assert sent == ["_allgather"] * messages + ["_reducescatter_into"] * messages


def case_broadcast_returns_the_array_of_each_root(communicator: Communicator) -> None:
    for root in range(communicator.size):
        for dtype in DTYPES:
            mine = values(communicator.rank, dtype)
            check_same(communicator.broadcast(mine, root), values(root, dtype), dtype, root)
        for shape in SHAPES:
            mine = values(communicator.rank, BFLOAT16, shape)
            check_same(communicator.broadcast(mine, root), values(root, BFLOAT16, shape), shape, root)


def case_reducescatter_gives_the_first_ranks_the_remainder(communicator: Communicator) -> None:
    for dtype in DTYPES:
        for rows in range(2 * communicator.size + 1):
            arrays = values_of_all(communicator, dtype, (rows, 2))
            start, end = shard_range(rows, communicator.rank, communicator.size)
            for op in operations(dtype):
                result = communicator.reducescatter(arrays[communicator.rank], op)
                check_same(result, reduced(arrays, op)[start:end], dtype, rows, op)


def case_alltoall_splits_rows_equally(communicator: Communicator) -> None:
    for dtype in DTYPES:
        arrays = values_of_all(communicator, dtype, (2 * communicator.size, 3))
        rows, counts = communicator.alltoall(arrays[communicator.rank])
        mine = slice(2 * communicator.rank, 2 * communicator.rank + 2)
        check_same(rows, np.concatenate([array[mine] for array in arrays]), dtype)
        check_same(counts, np.full(communicator.size, 2, np.int32))


def case_alltoall_sends_rows_by_splits(communicator: Communicator) -> None:
    ranks = range(communicator.size)
    splits = [[(sender + 2 * receiver) % 3 for receiver in ranks] for sender in ranks]
    # One row more than the splits: it is not sent.
    arrays = [values(sender, np.dtype(np.float64), (sum(splits[sender]) + 1, 2)) for sender in ranks]
    rows, counts = communicator.alltoall(arrays[communicator.rank], splits[communicator.rank])
    expected = []
    for sender in ranks:
        start = sum(splits[sender][: communicator.rank])
        expected.append(arrays[sender][start : start + splits[sender][communicator.rank]])
    check_same(rows, np.concatenate(expected))
    check_same(counts, np.array([len(part) for part in expected], np.int32))


def case_invalid_arguments_are_the_same_error_on_all_ranks(communicator: Communicator) -> None:
    size = communicator.size
    for text, collective in {
        "dtype complex64 cannot": lambda: communicator.allreduce(np.ones(2, np.complex64)),
        "dtype object cannot": lambda: communicator.allgather(np.array([None])),
        "dtype <U1 cannot": lambda: communicator.broadcast("x"),
        "dtype complex128 cannot": lambda: communicator.reducescatter(np.ones(4, complex)),
        "dtype datetime64.* cannot": lambda: communicator.alltoall(np.zeros(size, "datetime64[s]")),
        rf"root={size} is not one of the {size} ranks": lambda: communicator.broadcast(1.0, size),
        "root=-1 is not": lambda: communicator.broadcast(1.0, -1),
        "a scalar has no rows to scatter": lambda: communicator.reducescatter(1.0),
        "dtype object": lambda: communicator.grouped_allgather([1.0, np.array([None])]),
        "op=Adasum combines whole arrays": lambda: communicator.reducescatter(np.ones(4), Reduction.ADASUM),
        "needs floating-point values, not int64": lambda: communicator.allreduce([1, 2], Reduction.ADASUM),
        "a scalar has no rows to send": lambda: communicator.alltoall(1.0),
        "must be . whole numbers": lambda: communicator.alltoall(np.ones(4), [1] * (size + 1)),
        "none negative": lambda: communicator.alltoall(np.ones(4), [-1] * size),
        "at most the 4 rows": lambda: communicator.alltoall(np.ones(4), [5] * size),
        "that add up to": lambda: communicator.alltoall(np.ones(4), [2**62] * size),
        "not distinct ranks": lambda: communicator.split([0, 0]),
        "ranks .* are not": lambda: communicator.split([size]),
        r"ranks \[\] are not": lambda: communicator.split([]),
    }.items():
        with pytest.raises(ConfigError, match=text):
            collective()
    if size > 1:
        with pytest.raises(ConfigError, match="cannot be split equally"):
            communicator.alltoall(np.ones(size + 1))


def case_each_call_costs_one_control_message(communicator: Communicator) -> None:
    rows = np.ones((communicator.size, 2))
    for collective in (
        lambda: communicator.allreduce(rows),
        lambda: communicator.grouped_allreduce([rows, rows, rows]),
        lambda: communicator.allgather(rows),
        lambda: communicator.grouped_allgather([rows, rows, rows]),
        lambda: communicator.broadcast(rows),
        lambda: communicator.reducescatter(rows),
        lambda: communicator.grouped_reducescatter([rows, rows, rows]),
        lambda: communicator.alltoall(rows),
        lambda: communicator.barrier(),
        lambda: communicator.split([0]),
    ):
        before = communicator.collectives
        collective()
        assert communicator.collectives == before + 1


def case_started_collectives_keep_their_order_among_blocking_ones(communicator: Communicator) -> None:
    size = communicator.size
    reductions = [communicator.start("", communicator.allreduce, np.full(3, float(i)), Reduction.SUM) for i in range(4)]
    check_same(communicator.allgather([communicator.rank]), np.arange(size))
    gathering = communicator.start("", communicator.allgather, [[communicator.rank]])
    communicator.barrier()
    assert gathering.done()
    check_same(gathering.wait(), np.arange(size)[:, None])
    for i, work in reversed(list(enumerate(reductions))):
        check_same(work.wait(), np.full(3, float(i * size)))


def case_error_of_a_started_collective_is_raised_by_wait(communicator: Communicator) -> None:
    work = communicator.start("", communicator.broadcast, 1.0, communicator.size)
    assert communicator.allreduce(1, Reduction.SUM) == communicator.size
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not one of the"):
            work.wait()


def case_subsets_work_concurrently_and_can_be_split_again(communicator: Communicator) -> None:
    halves = [list(range(start, communicator.size, 2)) for start in range(min(2, communicator.size))]
    parts = [communicator.split(half[::-1]) for half in halves]
    (mine,) = [part for part in parts if part is not None]
    half = halves[communicator.rank % 2]
    assert mine.ranks == tuple(half)
    assert (mine.rank, mine.size) == (half.index(communicator.rank), len(half))
    assert mine.allreduce(communicator.rank, Reduction.SUM) == sum(half)
    last = mine.split([len(half) - 1])
    assert (last is None) == (communicator.rank != half[-1])
    if last is not None:
        assert last.ranks == (half[-1],)
        last.barrier()
        last.close()
    mine.close()
    communicator.barrier()
