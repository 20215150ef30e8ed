"""Compressions on ranks that are threads: results, residuals, bytes, and the accuracy of trained models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from choros.comm import BFLOAT16, ProcessSet, Reduction
from choros.errors import ConfigError, MismatchError
from choros.parallel import ops
from choros.parallel.calls import CollectiveCall
from choros.parallel.compression import Compression, Compressor
from choros.parallel.compression.power_sgd import matrix_shape
from choros.parallel.compression.sliced import BLOCK
from choros.parallel.reduce.gradients import layout_of
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
from harness import Job, check_case, on
from parallel.digits import SGD, accuracy, batches, gradients, initial_weights
from parallel.threads import on_threads

COMPRESSORS = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "top_k": Compression.top_k(0.05),
    "power_sgd": Compression.power_sgd(2),
}
LOSSY = ["int8", "top_k", "power_sgd"]
CASES = "parallel.compression_cases"


def arrays(seed: int) -> list[NDArray]:
    """Kernels of a dense layer and a convolution, and arrays that some compressions send uncompressed."""
    generator = np.random.default_rng(seed)
    shapes = ((64, 48), (3, 3, 16, 24), (48,), (), (0, 5))
    dtypes = (np.float32, np.float64, np.float32, BFLOAT16, np.float32)
    floating = [generator.normal(size=shape).astype(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return [*floating, generator.integers(-9, 9, (40, 40)), generator.normal(size=7).astype(np.float16)]


def reduce(
    compressor: Compressor, ranks: Sequence[Sequence[Sequence[NDArray]]], op: Reduction = Reduction.SUM, groups: int = 1
) -> list[list[list[NDArray]]]:
    """Returns the results of each rank in each of its steps."""

    def rank_main(process_set: ProcessSet) -> list[list[NDArray]]:
        config = ReduceConfig(op=op, compressor=compressor, groups=groups, process_set=process_set)
        reducer = GradientReducer(config)
        results = [reducer.reduce(step, examples=1) for step in ranks[process_set.communicator.rank]]
        reducer.join(layout_of(ranks[0][0]))
        return results

    return on_threads(len(ranks), rank_main)


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_results_are_the_same_on_all_ranks_and_of_the_same_shape_and_dtype(name: str, ranks: int, groups: int) -> None:
    steps = [[arrays(10 * rank + step) for step in range(3)] for rank in range(ranks)]
    results = reduce(COMPRESSORS[name], steps, groups=groups)
    for step in range(3):
        for index, given in enumerate(steps[0][step]):
            received = [result[step][index] for result in results]
            assert {(array.shape, array.dtype) for array in received} == {(given.shape, given.dtype)}
            for other in received:
                np.testing.assert_array_equal(other, received[0])
    for given, result in zip(zip(*(rank[0] for rank in steps), strict=True), results[0][0], strict=True):
        if result.dtype.kind == "i":  # integers are never rounded
            np.testing.assert_array_equal(result, sum(given))


def test_bf16_rounds_before_and_after_the_sum_but_not_within() -> None:
    own = [arrays(rank)[0] for rank in range(3)]
    total = np.zeros_like(own[0])
    for array in own:
        total += array.astype(BFLOAT16).astype(np.float32)
    (result,) = reduce(Compression.bf16, [[[array]] for array in own])[0][0]
    np.testing.assert_array_equal(result, total.astype(BFLOAT16).astype(np.float32))


def test_bf16_has_the_range_of_float32() -> None:
    small, large = np.full(3, 1e-30, np.float32), np.full(3, 1e30, np.float32)
    for result in reduce(Compression.bf16, [[[small, large]]] * 2)[0][0]:
        assert (result > 0).all()
        assert np.isfinite(result).all()


def test_int8_rounds_to_half_a_step_of_the_block() -> None:
    given = np.random.default_rng(0).normal(size=3 * BLOCK + 5).astype(np.float32)
    given[BLOCK] = 1000  # reduces the precision of its own block only
    ((result,),) = reduce(Compression.int8, [[[given]]])[0]
    # The rank rounds its numbers and, as the owner of the slice, their sum.
    for start in range(0, len(given), BLOCK):
        block = slice(start, start + BLOCK)
        assert np.abs(result[block] - given[block]).max() <= 1.01 * np.abs(given[block]).max() / 127


def test_top_k_sends_the_largest_elements() -> None:
    one, other = np.zeros(2000, np.float32), np.zeros(2000, np.float32)
    one[[3, 7, 11]], other[[7, 1999]] = (5.0, -4.0, 1.0), (-3.0, 2.0)
    ((result,),) = reduce(Compression.top_k(0.001), [[[one]], [[other]]])[0]
    assert {int(index): float(result[index]) for index in np.flatnonzero(result)} == {3: 5.0, 7: -7.0, 1999: 2.0}


def test_power_sgd_is_exact_for_matrices_of_its_rank() -> None:
    generator = np.random.default_rng(0)
    steps = []
    for _ in range(2):  # the columns of all ranks' matrices, hence of their sum, are in one plane
        rows = generator.normal(size=(2, 50)).astype(np.float32)
        steps.append([[np.array([[1, 0], [0, 1]] * 30, np.float32) @ rows]])
    ((result,),) = reduce(Compression.power_sgd(2), steps)[0]
    np.testing.assert_allclose(result, steps[0][0][0] + steps[1][0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "matrix"), [((), (1, 1)), ((7,), (1, 7)), ((5, 4, 3), (5, 12)), ((1, 64, 3), (64, 3))]
)
def test_arrays_are_reshaped_to_the_matrix_nearest_to_a_square(shape: tuple, matrix: tuple) -> None:
    assert matrix_shape(shape) == matrix


# ── error feedback ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", LOSSY)
def test_residuals_are_sent_by_later_steps(name: str, ranks: int) -> None:
    """After enough steps with zeros, the sum of the results is the sum of all gradients."""
    given = [arrays(rank)[0] for rank in range(ranks)]
    silent = [np.zeros_like(given[0])]
    steps = [[[own]] * 5 + [silent] * 600 for own in given]
    results = reduce(COMPRESSORS[name], steps)[0]
    arrived = np.sum([step[0] for step in results], axis=0)
    np.testing.assert_allclose(arrived, 5 * sum(given), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", LOSSY)
def test_joined_rank_still_sends_its_residual(name: str) -> None:
    first, zeros = [arrays(0)[0]], [np.zeros_like(arrays(0)[0])]
    results = reduce(COMPRESSORS[name], [[zeros] * 601, [first]])[0]
    arrived = np.sum([step[0] for step in results], axis=0)
    # The gradient of rank 1 has weight 1/2: it has one of two examples in that step.
    np.testing.assert_allclose(2 * arrived, 2 * first[0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_values_that_are_not_finite_reach_all_ranks_and_leave_no_residual(name: str, value: float) -> None:
    ok = [arrays(0)[0]]
    overflow = [ok[0].copy()]
    overflow[0][5, 7] = value
    undisturbed = reduce(COMPRESSORS[name], [[ok, ok]] * 2)
    disturbed = reduce(COMPRESSORS[name], [[ok, ok, ok], [ok, overflow, ok]])
    for rank in range(2):
        assert not np.isfinite(disturbed[rank][1][0]).all()
        np.testing.assert_array_equal(disturbed[rank][2][0], undisturbed[rank][1][0])


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────

#: The numbers of elements of ``arrays()``.
KERNEL, CONVOLUTION, BIAS, SCALAR, WHOLE, HALF = 64 * 48, 9 * 16 * 24, 48, 1, 40 * 40, 7
UNCOMPRESSED = 8 * WHOLE + 2 * HALF


def slices(elements: int, bytes_of: Callable[[int], int]) -> int:
    """Returns the bytes that rank 0 of two sends: its encoded slices, and the sum of its own slice."""
    own, other = (elements + 1) // 2, elements // 2
    return 2 * bytes_of(own) + bytes_of(other)


BYTES = {
    "none": 4 * KERNEL + 8 * CONVOLUTION + 4 * BIAS + 4 * SCALAR + UNCOMPRESSED,
    "fp16": 2 * (KERNEL + CONVOLUTION + BIAS + SCALAR) + UNCOMPRESSED,
    "bf16": slices(KERNEL + CONVOLUTION + BIAS + SCALAR, lambda n: 2 * n) + UNCOMPRESSED,
    "int8": slices(KERNEL + CONVOLUTION + BIAS + SCALAR + HALF, lambda n: n + 4 * -(-n // BLOCK)) + 8 * WHOLE,
    "top_k": 8 * -(-(KERNEL + CONVOLUTION) * 5 // 100) + 4 * BIAS + 4 * SCALAR + UNCOMPRESSED,
    "power_sgd": 4 * 2 * (64 + 48 + 144 + 24) + 4 * BIAS + 4 * SCALAR + UNCOMPRESSED,
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_bytes_are_as_documented(name: str) -> None:
    def rank_main(process_set: ProcessSet) -> int:
        reducer = GradientReducer(ReduceConfig(compressor=COMPRESSORS[name], process_set=process_set))
        for _ in range(3):
            reducer.reduce(arrays(0), examples=1)
        return process_set.communicator.bytes_sent

    assert on_threads(2, rank_main)[0] == 3 * BYTES[name]


# ── learning ─────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def learned(name: str) -> float:
    """Returns the accuracy on digits after training on two ranks."""

    def rank_main(process_set: ProcessSet) -> float:
        reducer = GradientReducer(ReduceConfig(compressor=COMPRESSORS[name], process_set=process_set))
        optimizer = SGD(initial_weights())
        for batch in batches(process_set.communicator.rank, 2, epochs=20):
            optimizer.step(reducer.reduce(gradients(optimizer.weights, batch), examples=len(batch)))
        return accuracy(optimizer.weights)

    one, other = on_threads(2, rank_main)
    assert one == other
    return one


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "none"])
def test_accuracy_is_that_of_uncompressed_training(name: str) -> None:
    assert learned("none") > 0.97
    assert abs(learned(name) - learned("none")) <= 0.01


# ── invalid arguments ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, float("nan")])
def test_top_k_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match="expected a ratio of more than 0 and at most 1"):
        Compression.top_k(ratio)


@pytest.mark.parametrize("rank", [0, 1.5])
def test_power_sgd_rank_out_of_range(rank: float) -> None:
    with pytest.raises(ConfigError, match=rf"power_sgd\(rank={rank}\): expected a whole rank of 1 or more"):
        Compression.power_sgd(rank)  # type: ignore[arg-type]


def test_a_compressor_of_ones_own_is_refused() -> None:
    class Half:
        """Horovod's interface."""

        compress = decompress = staticmethod(lambda *tensors: tensors)

    for refuses in (lambda: ReduceConfig(compressor=Half), lambda: CollectiveCall("allreduce", compression=Half)):
        with pytest.raises(ConfigError, match=r"compression=Half is none of Compression's.*fp16 or bf16 for a cast"):
            refuses()


@pytest.mark.parametrize("name", ["bf16", *LOSSY])
def test_allreduce_of_a_single_array_rejects_compressions_of_gradients(name: str) -> None:
    def rank_main(process_set: ProcessSet) -> None:
        whole = np.arange(3)
        np.testing.assert_array_equal(
            ops.allreduce(whole, compression=COMPRESSORS[name], process_set=process_set), whole
        )
        with pytest.raises(ConfigError, match=rf"compression={name}: an allreduce of a single array .* none and fp16"):
            ops.allreduce(np.ones(3), compression=COMPRESSORS[name], process_set=process_set)

    on_threads(2, rank_main)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Compression.none, Compression.bf16),
        (Compression.int8, Compression.bf16),
        (Compression.top_k(0.1), Compression.top_k(0.2)),
        (Compression.power_sgd(1), Compression.power_sgd(2)),
    ],
)
def test_ranks_with_different_compressions_mismatch(one: Compressor, other: Compressor) -> None:
    def rank_main(process_set: ProcessSet) -> None:
        compressor = other if process_set.rank() else one
        reducer = GradientReducer(ReduceConfig(compressor=compressor, process_set=process_set))
        with pytest.raises(MismatchError, match="sent as"):
            reducer.reduce([np.ones((64, 64), np.float32)], examples=1)

    on_threads(2, rank_main)


# ── on real ranks ────────────────────────────────────────────────────────────────────────────────


@on(Job(3), cases=CASES)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)
