"""The gradient reducer on ranks that are threads: weighting, accumulation, and ranks with fewer batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from choros.comm import BFLOAT16, ProcessSet, Reduction
from choros.comm.joining import join
from choros.errors import ConfigError, EngineError, MismatchError
from choros.parallel.compression import Compression
from choros.parallel.reduce.gradients import SparseRows, layout_of
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
from parallel.threads import on_threads

#: A batch: the gradient of its mean loss, and its number of examples.
Batch = tuple[float, int]


def gradients(value: float) -> list[NDArray]:
    """Returns gradients of three variables of two dtypes."""
    return [np.full((2, 3), value, np.float32), np.full((), value / 2, np.float64), np.full(4, -value, np.float32)]


def train(batches: Sequence[Sequence[Batch]], **config: Any) -> list[list[float]]:
    """Returns the first variable's reduced gradient for each of the ranks' ``batches``; all ranks join at the end."""

    def rank_main(process_set: ProcessSet) -> list[float]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, **config))
        return epoch(reducer, batches[process_set.rank()])

    return on_threads(len(batches), rank_main)


def epoch(reducer: GradientReducer, batches: Sequence[Batch]) -> list[float]:
    reduced = []
    for step, (value, examples) in enumerate(batches, start=1):
        exchange = step % reducer.config.micro_batches == 0
        first, second, third = reducer.reduce(gradients(value), examples=examples, exchange=exchange)
        np.testing.assert_array_equal(first, np.full((2, 3), first[0, 0]))
        np.testing.assert_allclose(second, first[0, 0] / 2, rtol=1e-3)
        np.testing.assert_array_equal(third, np.full(4, -first[0, 0]))
        reduced.append(float(first[0, 0]))
    reducer.join(layout_of(gradients(0)))
    return reduced


# ── one step ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("exchange", [True, False])
def test_fewer_examples_than_none_are_an_error_on_all_ranks(*, exchange: bool) -> None:
    def rank_main(process_set: ProcessSet) -> str:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, micro_batches=2))
        with pytest.raises(ConfigError if process_set.rank() == 0 else MismatchError) as caught:
            reducer.reduce(gradients(1.0), examples=32 if process_set.rank() else -1, exchange=exchange)
        return str(caught.value)

    assert all("examples=-1: expected the number in the batch" in text for text in on_threads(2, rank_main))


@pytest.mark.parametrize("groups", [None, 0, 1, 2, 9, ((2, 0),), ((1,), (0,))])
def test_average_is_over_examples(groups: Any) -> None:
    mean = (3 * 1.0 + 1 * 2.0 + 4 * 4.0) / 8
    assert train([[(1.0, 3)], [(2.0, 1)], [(4.0, 4)]], groups=groups) == [[mean]] * 3


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_predivide_factor_does_not_change_the_average(factor: float) -> None:
    assert train([[(1.0, 3)], [(2.0, 1)]], predivide_factor=factor) == [[1.25]] * 2


def test_sum_does_not_depend_on_the_number_of_examples() -> None:
    assert train([[(1.0, 3)], [(2.0, 1)], [(4.0, 4)]], op=Reduction.SUM) == [[7.0]] * 3


def test_fp16_averages_before_sending() -> None:
    assert train([[(60000.0, 1)], [(60000.0, 1)], [(60000.0, 2)]], compressor=Compression.fp16) == [[60000.0]] * 3


def test_fp16_rounds_sent_values() -> None:
    third = float(np.float16(1 / 3) + np.float16(1 / 3))
    assert train([[(2 / 3, 1)], [(2 / 3, 1)]], compressor=Compression.fp16) == [[third]] * 2


def test_infinities_and_nan_reach_all_ranks_without_a_warning() -> None:
    for compressor in (Compression.none, Compression.fp16):
        assert train([[(np.inf, 1)], [(1.0, 1)]], compressor=compressor) == [[np.inf]] * 2
        assert np.isnan(train([[(np.inf, 1)], [(-np.inf, 1)]], compressor=compressor)).all()


def test_gradients_are_divided_before_they_are_made_narrower() -> None:
    def rank_main(process_set: ProcessSet) -> float:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, compressor=Compression.fp16))
        (mean,) = reducer.reduce([np.full(3, 1e5 * process_set.rank(), np.float32)], examples=1)
        return float(mean[0])

    assert on_threads(2, rank_main) == [pytest.approx(5e4, rel=1e-3)] * 2  # 1e5 is more than float16 has


@pytest.mark.parametrize("steps", [1, 2])
def test_overflow_of_the_wire_dtype_is_an_infinity_without_a_warning(steps: int) -> None:
    batches = [[(1e6, 1)] * steps, [(1.0, 1)] * steps]
    assert train(batches, micro_batches=steps, compressor=Compression.fp16) == [[0.0] * (steps - 1) + [np.inf]] * 2


def test_bfloat16_is_reduced_in_float32_and_rounded_once() -> None:
    def rank_main(process_set: ProcessSet) -> NDArray:
        reducer = GradientReducer(ReduceConfig(op=Reduction.SUM, process_set=process_set))
        return reducer.reduce([np.full(2, 256 if process_set.rank() == 0 else 1, BFLOAT16)], examples=1)[0]

    for total in on_threads(3, rank_main):
        assert (total.dtype, total.tolist()) == (BFLOAT16, [258, 258])


def test_results_are_new_arrays_and_inputs_are_not_written_to() -> None:
    def rank_main(process_set: ProcessSet) -> list[float]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        given = np.ones(3)
        given.setflags(write=False)
        first = reducer.reduce([given], examples=1)[0]
        reducer.reduce([given * 5], examples=1)[0][...] = 7
        return first.tolist()

    assert on_threads(2, rank_main) == [[1, 1, 1]] * 2


def test_shapes_of_gradients_may_change_between_steps() -> None:
    def rank_main(process_set: ProcessSet) -> list[list[float]]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        return [reducer.reduce([np.ones(n)], examples=1)[0].tolist() for n in (2, 3, 2)]

    assert on_threads(2, rank_main) == [[[1, 1], [1, 1, 1], [1, 1]]] * 2


def test_reduction_of_no_gradients() -> None:
    def rank_main(process_set: ProcessSet) -> list[list[NDArray]]:
        return [
            GradientReducer(ReduceConfig(process_set=process_set, groups=groups)).reduce([], examples=1)
            for groups in (None, 2, ((0,),))
        ]

    assert on_threads(2, rank_main) == [[[], [], []]] * 2


def test_empty_batch_is_ignored_although_its_gradient_is_not_a_number() -> None:
    assert train([[(2.0, 4)], [(np.nan, 0)]]) == [[2.0]] * 2


def test_empty_batches_on_all_ranks_are_an_error() -> None:
    def rank_main(process_set: ProcessSet) -> None:
        with pytest.raises(EngineError, match="the batch has 0 examples"):
            GradientReducer(ReduceConfig(process_set=process_set)).reduce([np.ones(2)], examples=0)

    on_threads(2, rank_main)


# ── accumulation ─────────────────────────────────────────────────────────────────────────────────

MICRO_BATCHES = [[(1.0, 3), (2.0, 1)], [(4.0, 2), (8.0, 2)]]
#: The sum of the means over the examples of each micro-batch; Keras divides by their number.
MEANS = (3 * 1.0 + 2 * 4.0) / 5 + (1 * 2.0 + 2 * 8.0) / 3


@pytest.mark.parametrize(
    ("config", "reduced"),
    [
        ({"average_micro_batches": True}, MEANS),
        ({"average_micro_batches": False}, 2 * MEANS),
        ({"op": Reduction.SUM, "average_micro_batches": True}, 1.0 + 2.0 + 4.0 + 8.0),
        ({"op": Reduction.SUM, "average_micro_batches": False}, 2 * (1.0 + 2.0 + 4.0 + 8.0)),
        ({"predivide_factor": 2.0}, MEANS),
    ],
)
def test_micro_batches_are_reduced_after_the_last(config: dict[str, Any], reduced: float) -> None:
    for first, *others in train(MICRO_BATCHES, micro_batches=2, **config):
        assert first == 0.0
        assert others == pytest.approx([reduced])


def test_micro_batches_move_data_once_per_step() -> None:
    def rank_main(process_set: ProcessSet) -> int:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, micro_batches=3))
        for step in range(6):
            reducer.reduce(gradients(1.0), examples=1, exchange=step % 3 == 2)
        return process_set.communicator.bytes_sent

    assert on_threads(2, rank_main) == [2 * sum(gradient.nbytes for gradient in gradients(1.0))] * 2


def test_micro_batches_that_are_forgotten_do_not_count() -> None:
    def rank_main(process_set: ProcessSet) -> tuple[int, int, int]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, micro_batches=2))
        for exchange in (False, True, False):
            reducer.reduce(gradients(1.0), examples=1, exchange=exchange)
        return reducer.forget_accumulated(), reducer.batches, reducer.accumulated

    assert on_threads(2, rank_main) == [(1, 2, 0)] * 2


def test_rank_without_examples_in_some_micro_batches() -> None:
    batches = [[(1.0, 3), (np.nan, 0), (2.0, 1), (7.0, 1)], [(4.0, 1), (3.0, 2), (np.nan, 0), (5.0, 3)]]
    reduced = [(3 * 1.0 + 4.0) / 4 + 3.0, 2.0 + (7.0 + 3 * 5.0) / 4]
    for got in train(batches, micro_batches=2):
        assert got == pytest.approx([0.0, reduced[0], 0.0, reduced[1]])


def test_ranks_that_are_at_different_micro_batches_mismatch() -> None:
    def rank_main(process_set: ProcessSet) -> None:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, micro_batches=2))
        with pytest.raises(MismatchError, match="micro-batch"):
            reducer.reduce(gradients(1.0), examples=1, exchange=process_set.rank() == 0)

    on_threads(2, rank_main)


# ── ranks with different numbers of batches ──────────────────────────────────────────────────────


def test_average_is_over_the_ranks_that_still_have_batches() -> None:
    batches = [[(1.0, 1), (2.0, 1), (4.0, 3)], [(3.0, 1)], [(5.0, 2), (8.0, 1)]]
    steps = [(1.0 + 3.0 + 2 * 5.0) / 4, (2.0 + 8.0) / 2, 4.0]
    assert train(batches) == [steps, steps[:1], steps[:2]]


def test_rank_without_batches_joins_immediately() -> None:
    assert train([[(1.0, 2), (3.0, 2)], []]) == [[1.0, 3.0], []]


@pytest.mark.parametrize(
    ("counts", "last"), [((2, 2), None), ((0, 0), None), ((2, 1), 0), ((1, 2), 1), ((1, 2, 2), 1), ((0, 0, 1), 2)]
)
def test_join_returns_a_rank_of_the_last_step_if_another_had_no_batch_in_it(
    counts: Sequence[int], last: int | None
) -> None:
    def rank_main(process_set: ProcessSet) -> list[int | None]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        results = []
        for _ in range(2):
            for _ in range(counts[process_set.rank()]):
                reducer.reduce(gradients(1.0), examples=1)
            results.append(reducer.join(layout_of(gradients(0))))
        return results

    assert on_threads(len(counts), rank_main) == [[last, last]] * len(counts)


def test_pending_micro_batches_of_a_joined_rank_count_in_the_next_reduction() -> None:
    assert train([[(1.0, 1), (3.0, 2)], [(5.0, 1)]], micro_batches=2) == [[0.0, (1.0 + 5.0) / 2 + 3.0], [0.0]]


def test_joined_rank_takes_part_in_micro_batches_and_keeps_what_is_pending_for_the_next_epoch() -> None:
    def rank_main(process_set: ProcessSet) -> tuple[list[float], list[int | None]]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, micro_batches=3))
        reduced, last = [], []
        # Micro-batches 1 to 4, then 5 and 6: rank 1 has none in the 2nd, 3rd and 4th.
        for first, count in ((1, 4 if process_set.rank() == 0 else 1), (5, 2)):
            for number in range(first, first + count):
                gradient = gradients(float(number + process_set.rank()))
                reduced.append(float(reducer.reduce(gradient, examples=1, exchange=number % 3 == 0)[0][0, 0]))
            last.append(reducer.join(layout_of(gradients(0))))
        return reduced, last

    one, two = 1.5 + 2 + 3, 4 + 5.5 + 6.5
    assert on_threads(2, rank_main) == [([0.0, 0.0, one, 0.0, 0.0, two], [0, None]), ([0.0, 0.0, two], [0, None])]


def test_pending_micro_batches_after_all_ranks_have_joined_count_in_the_next_epoch() -> None:
    def rank_main(process_set: ProcessSet) -> list[list[float]]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, micro_batches=2))
        first = [float(reducer.reduce(gradients(1.0), examples=1, exchange=False)[0][0, 0])]
        assert reducer.join(layout_of(gradients(0))) is None
        second = [float(reducer.reduce(gradients(3.0), examples=1)[0][0, 0])]
        return [first, second]

    assert on_threads(2, rank_main) == [[[0.0], [4.0]]] * 2


def test_joined_rank_follows_several_reducers_in_the_order_of_the_others() -> None:
    def rank_main(process_set: ProcessSet) -> list[list[float]]:
        reducers = [GradientReducer(ReduceConfig(process_set=process_set), name=f"optimizer {i}") for i in range(2)]
        reduced: list[list[float]] = [[], []]
        if process_set.rank() == 0:
            for which in (1, 0, 0, 1):
                reduced[which].append(float(reducers[which].reduce(gradients(2.0), examples=1)[0][0, 0]))
        parts = [reducer.participation(layout_of(gradients(0))) for reducer in reducers]
        join(process_set.communicator, {**parts[0], **parts[1]})
        assert [reducer.last_active() for reducer in reducers] == [0, 0]
        return reduced

    assert on_threads(2, rank_main) == [[[2.0, 2.0], [2.0, 2.0]], [[], []]]


def test_a_rank_with_a_batch_in_the_last_step_comes_before_heirs() -> None:
    def rank_main(process_set: ProcessSet) -> int | None:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        if process_set.rank() == 0:
            reducer.reduce(gradients(2.0), examples=1)
        join(process_set.communicator, reducer.participation(layout_of(gradients(0))))
        return reducer.last_active(heirs=[1])

    assert on_threads(2, rank_main) == [0, 0]


def test_joined_rank_has_the_gradients_of_buckets_in_their_order() -> None:
    given = [np.full((), 2.0), np.full(3, 4.0)]

    def rank_main(process_set: ProcessSet) -> list[list[Any]]:
        reducer, updates = GradientReducer(ReduceConfig(process_set=process_set, bucket_bytes=8)), []
        if process_set.rank() == 0:
            for bucket, indices in enumerate(reducer.plan(layout_of(given))):
                reducer.send(bucket, [given[index] for index in indices], examples=1)
        reducer.join(layout_of(given), lambda _, sums: updates.append([each.tolist() for each in sums]))
        return updates

    assert on_threads(2, rank_main) == [[], [[2.0, [4.0, 4.0, 4.0]]]]


def test_joined_rank_that_does_not_know_the_others_call_mismatches_on_all() -> None:
    def rank_main(process_set: ProcessSet) -> float:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        with pytest.raises(MismatchError, match=r"rank 0: split\(.*\n.*rank 1: join\("):
            process_set.communicator.split([0]) if process_set.rank() == 0 else reducer.join(layout_of(gradients(0)))
        return float(process_set.communicator.allreduce(1.0, Reduction.SUM))  # the next collective works

    assert on_threads(2, rank_main) == [2.0, 2.0]


# ── invalid arguments ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "arrays"),
    [
        ({}, [np.zeros(3)]),
        ({}, [np.zeros(2, np.float32)]),
        ({}, [np.zeros(2), np.zeros(2)]),
        ({"op": Reduction.SUM}, [np.zeros(2)]),
        ({"compressor": Compression.fp16}, [np.zeros(2)]),
        ({"predivide_factor": 2.0}, [np.zeros(2)]),
        ({"micro_batches": 2}, [np.zeros(2)]),
    ],
)
def test_ranks_with_different_gradients_mismatch_before_data_is_sent(
    config: dict[str, Any], arrays: list[NDArray]
) -> None:
    def rank_main(process_set: ProcessSet) -> None:
        differs = process_set.rank() == 1
        reducer = GradientReducer(ReduceConfig(process_set=process_set, **(config if differs else {})))
        with pytest.raises(MismatchError, match="1 arrays: float64"):
            reducer.reduce(arrays if differs else [np.zeros(2)], examples=1)

    on_threads(2, rank_main)


def test_rank_that_calls_another_collective_mismatches() -> None:
    def rank_main(process_set: ProcessSet) -> None:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        with pytest.raises(MismatchError, match=r"rank 0: gradients\(.*\n.*rank 1: barrier"):
            process_set.communicator.barrier() if process_set.rank() else reducer.reduce([np.ones(2)], examples=1)

    on_threads(2, rank_main)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"op": Reduction.MAX}, "op=Max: gradients can be reduced with Average or Sum"),
        ({"predivide_factor": 0.0}, "gradient_predivide_factor=0.0 must be greater than 0"),
        ({"predivide_factor": 2.0, "op": Reduction.SUM}, "needs op=Average"),
        ({"micro_batches": 0}, "backward_passes_per_step=0 must be 1 or more"),
        ({"micro_batches": 1.5}, "backward_passes_per_step=1.5 must be 1 or more"),
        ({"micro_batches": None}, "backward_passes_per_step=None must be 1 or more"),
    ],
)
def test_invalid_config(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ReduceConfig(**config)


@pytest.mark.parametrize(
    ("groups", "indices"),
    [
        (None, [[0, 1, 2, 3, 4]]),
        (2, [[0, 1, 2], [3, 4]]),
        (9, [[0], [1], [2], [3], [4]]),
        (((3, 1), (4,)), [[3, 1], [4], [0, 2]]),
        (((0, 1, 2, 3, 4),), [[0, 1, 2, 3, 4]]),
    ],
)
def test_groups(groups: Any, indices: list[list[int]]) -> None:
    assert ReduceConfig(groups=groups).group_indices(5) == indices


def test_reducer_is_active_if_there_are_other_ranks() -> None:
    assert on_threads(2, lambda all_ranks: GradientReducer(ReduceConfig(process_set=all_ranks)).active) == [True, True]
    assert on_threads(1, lambda all_ranks: GradientReducer(ReduceConfig(process_set=all_ranks)).active) == [False]
    outside, unregistered = ProcessSet([1]), ProcessSet([0])
    outside.register(1, [1], None)
    assert not GradientReducer(ReduceConfig(process_set=outside)).active
    assert not GradientReducer(ReduceConfig(process_set=unregistered)).active


def test_plans_are_made_again_after_the_members_are_registered_again() -> None:
    def rank_main(process_set: ProcessSet) -> tuple[bool, list[float]]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        batches = [(float(process_set.rank()), 1)]
        results = epoch(reducer, batches)
        before = process_set.communicator
        after = before.split(range(before.size))
        process_set.register(0, process_set.ranks, after)
        collectives = before.collectives
        results += epoch(reducer, batches)
        return before.collectives == collectives and after.collectives > 0, results

    assert on_threads(2, rank_main) == [(True, [0.5, 0.5])] * 2


# ── sparse gradients ─────────────────────────────────────────────────────────────────────────────────


def rows(indices: Sequence[int], value: float, *, width: int = 2, index_dtype: str = "int64") -> SparseRows:
    values = np.full((len(indices), width), value, np.float32)
    return SparseRows(np.array(indices, index_dtype), values, shape=(9, width))


def test_rows_of_a_narrow_dtype_are_added_in_a_wider_one() -> None:
    values = np.ones((1000, 1), BFLOAT16)
    merged = SparseRows(np.zeros(1000, np.int64), values, shape=(9, 1)).merged()
    assert merged.values.dtype == BFLOAT16
    assert merged.values.tolist() == [[1000.0]]


@pytest.mark.parametrize("bucket_bytes", [None, 8])
def test_rows_are_gathered_in_rank_order_and_weighted_like_dense_gradients(bucket_bytes: int | None) -> None:
    """Rank 0 has 3 of 4 examples; two sparse gradients of different dtypes beside two dense ones."""

    def rank_main(process_set: ProcessSet) -> list[Any]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, bucket_bytes=bucket_bytes))
        first = process_set.rank() == 0
        given = [
            np.full(3, 1.0 if first else 5.0),
            rows([7, 7, 1], 1.0) if first else rows([], 0.0),
            np.full((), 1.0 if first else 5.0, np.float32),
            rows([0], 4.0, width=3, index_dtype="int32") if first else rows([2, 0], 8.0, width=3, index_dtype="int32"),
        ]
        return reducer.reduce(given, examples=3 if first else 1)

    for dense, words, number, users in on_threads(2, rank_main):
        assert (dense.tolist(), float(number)) == ([2.0] * 3, 2.0)
        assert (words.indices.tolist(), words.values[:, 0].tolist()) == ([7, 7, 1], [0.75] * 3)
        assert (users.indices.tolist(), users.values[:, 2].tolist()) == ([0, 2, 0], [3.0, 2.0, 2.0])
        assert (users.indices.dtype, users.values.dtype, users.shape) == (np.int32, np.float32, (9, 3))


@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16, Compression.int8])
def test_rows_are_sent_in_the_dtype_of_the_compression(compressor: Any) -> None:
    def rank_main(process_set: ProcessSet) -> tuple[float, int]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, compressor=compressor))
        (gathered,) = reducer.reduce([rows([1], 1.01)], examples=1)
        return float(gathered.values[0, 0]), process_set.communicator.bytes_sent

    for value, sent in on_threads(2, rank_main):
        narrow = compressor is not Compression.int8
        assert value == pytest.approx(0.505, rel=4e-3)
        assert (value == np.float32(0.505)) is not narrow
        assert sent == 16 + 8 + 2 * (2 if narrow else 4)


@pytest.mark.parametrize(
    ("second", "repeats", "expected"),
    [
        ([3, 1], False, {1: 2.0, 3: 1.0, 7: 1.0}),
        ([3, 1], True, None),
        ([1, 1], False, None),
        ([], False, {1: 1.0, 7: 1.0}),
    ],
)
def test_rows_that_every_rank_has_once_are_summed_unless_they_may_repeat(
    second: list[int], repeats: bool, expected: dict[int, float] | None
) -> None:
    first = [7, 1]

    def rank_main(process_set: ProcessSet) -> SparseRows:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, op=Reduction.SUM))
        own = rows(first if process_set.rank() == 0 else second, 1.0)
        layout = (own.layout._replace(repeats=repeats),)
        return reducer.reduce([own], examples=1, layout=layout)[0]

    for reduced in on_threads(2, rank_main):
        if expected is None:
            assert reduced.indices.tolist() == first + second
        else:
            assert dict(zip(reduced.indices.tolist(), reduced.values[:, 1].tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("first", "second", "of_batch", "is_sum"),
    [
        ([7, 1, 1], [7, 1, 1], False, True),
        ([7, 1, 1], [], False, True),
        ([7, 1], [1, 7], False, False),
        ([7, 1], [7, 1, 7, 1], False, False),
        ([7, 1], [7, 1], True, False),
        ([7, 1], [7, 1], None, True),
        ([7, 1, 1], [7, 1, 1], None, False),
        ([7], [7], None, False),
    ],
)
def test_rows_that_do_not_follow_from_the_batch_are_summed_one_by_one(
    first: list[int], second: list[int], of_batch: bool | None, is_sum: bool
) -> None:
    def rank_main(process_set: ProcessSet) -> SparseRows:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, op=Reduction.SUM))
        own = dataclasses.replace(rows(first if process_set.rank() == 0 else second, 1.0), of_batch=of_batch)
        return reducer.reduce([own], examples=1)[0]

    for reduced in on_threads(2, rank_main):
        assert reduced.indices.tolist() == (first if is_sum else first + second)
        assert set(reduced.values[:, 1].tolist()) == {2.0 if is_sum and second else 1.0}


def test_rows_of_bfloat16_are_scaled_in_float32() -> None:
    def rank_main(process_set: ProcessSet) -> float:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        own = SparseRows(np.array([0]), np.full((1, 1), 63, BFLOAT16), shape=(2, 1))
        return float(reducer.reduce([own], examples=32 - process_set.rank())[0].values[0, 0])

    assert on_threads(2, rank_main) == [32.0] * 2


def test_rows_of_micro_batches_are_sent_together() -> None:
    def rank_main(process_set: ProcessSet) -> list[list[Any]]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set, micro_batches=2, op=Reduction.SUM))
        early = reducer.reduce([rows([1], 1.0)], examples=1, exchange=False)[0]
        late = reducer.reduce([rows([2, 1], 2.0)], examples=1)[0]
        return [early.indices.tolist(), late.indices.tolist(), late.values[:, 0].tolist()]

    assert on_threads(2, rank_main) == [[[], [1, 2, 1] * 2, [1.0, 2.0, 2.0] * 2]] * 2


def test_a_joined_rank_contributes_no_rows() -> None:
    def rank_main(process_set: ProcessSet) -> list[list[int]]:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        received = [reducer.reduce([rows([process_set.rank()], 1.0)], examples=1)[0]]
        if process_set.rank() == 0:
            received.append(reducer.reduce([rows([5], 1.0)], examples=1)[0])
        reducer.join(layout_of([np.zeros((9, 2), np.float32)]), lambda _, reduced: received.append(reduced[0]))
        return [each.indices.tolist() for each in received]

    assert on_threads(2, rank_main) == [[[0, 1], [5]]] * 2


def test_sparse_and_dense_gradients_of_one_variable_mismatch() -> None:
    def rank_main(process_set: ProcessSet) -> str:
        reducer = GradientReducer(ReduceConfig(process_set=process_set))
        own = rows([1], 1.0) if process_set.rank() == 0 else np.ones((9, 2), np.float32)
        with pytest.raises(MismatchError) as caught:
            reducer.reduce([own], examples=1)
        return str(caught.value)

    for message in on_threads(2, rank_main):
        assert (
            "rank 0: gradients(op=Average, predivide_factor=1.0, micro_batches=1, 1 arrays: rows of float32[9, 2]"
            in message
        )
        assert "rank 1: gradients(op=Average, predivide_factor=1.0, micro_batches=1, 1 arrays: float32[9, 2]" in message
