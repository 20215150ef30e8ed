"""Adasum of any number of ranks against its definition, computed here in the plain way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from choros.comm import BFLOAT16, Communicator, Reduction, joining
from choros.comm.engines.threads import run_threads
from choros.errors import ConfigError, MismatchError

SHAPES = [(3,), (4, 5), (), (0, 2), (7,)]


def combined(vectors: list[NDArray]) -> NDArray:
    """Combines neighbours, level by level."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        odd = vectors[-1:] if len(vectors) % 2 else []
        vectors = [pair(a, b) for a, b in pairs] + odd
    return vectors[0]


def pair(a: NDArray, b: NDArray) -> NDArray:
    dot, square_a, square_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return a * (1 - dot / (2 * square_a) if square_a else 1) + b * (1 - dot / (2 * square_b) if square_b else 1)


def arrays_of(rank: int, dtype: np.dtype) -> list[NDArray]:
    random = np.random.default_rng(rank)
    return [(random.standard_normal(shape) * 10**-rank).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_definition(size: int) -> None:
    for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 1e-6), (np.float16, 2e-3), (BFLOAT16, 2e-2)):

        def run(communicator: Communicator, dtype: Any = dtype) -> list[NDArray]:
            return communicator.grouped_allreduce(arrays_of(communicator.rank, np.dtype(dtype)), Reduction.ADASUM)

        ranks = [arrays_of(rank, np.dtype(dtype)) for rank in range(size)]
        results = run_threads(run, size)
        for index, shape in enumerate(SHAPES):
            expected = combined([arrays[index].astype(np.float64) for arrays in ranks])
            for result in results:
                assert (result[index].dtype, result[index].shape) == (dtype, shape)
                np.testing.assert_array_equal(result[index], results[0][index])
                np.testing.assert_allclose(result[index].astype(np.float64), expected, rtol=tolerance, atol=1e-12)


def test_equal_vectors_are_averaged_orthogonal_ones_added_and_opposite_ones_cancel() -> None:
    def run(communicator: Communicator) -> list[NDArray]:
        rank = communicator.rank
        given = [np.array([3.0, 4.0]), np.eye(4)[rank], np.array([(-1.0) ** rank, 0.0]), np.zeros(2)]
        return communicator.grouped_allreduce(given, Reduction.ADASUM)

    for equal, orthogonal, opposite, zero in run_threads(run, 4):
        np.testing.assert_allclose(equal, [3, 4])
        np.testing.assert_allclose(orthogonal, np.ones(4))
        assert (opposite.tolist(), zero.tolist()) == ([0, 0], [0, 0])


def test_directions_count_not_lengths() -> None:
    """Also of vectors whose squares would underflow in their own dtype."""

    def run(communicator: Communicator) -> list[NDArray]:
        return [communicator.allreduce(np.full(2, 1e-30, np.float32), Reduction.ADASUM)]

    for (result,) in run_threads(run, 2):
        np.testing.assert_allclose(result, np.full(2, 1e-30, np.float32))


def test_invalid_arrays_are_errors_on_all_ranks() -> None:
    def integers(communicator: Communicator) -> str:
        array = np.ones(2, np.int32 if communicator.rank == 0 else np.float32)
        with pytest.raises(ConfigError if communicator.rank == 0 else MismatchError) as error:
            communicator.allreduce(array, Reduction.ADASUM, name="delta")
        communicator.allreduce(np.ones(2), Reduction.ADASUM)
        return str(error.value)

    first, second = run_threads(integers, 2)
    assert "needs floating-point values, not int32" in first
    assert "refused: op=Adasum" in second
    assert "op=Adasum, dtype=float32, shape=(2,)" in second


def test_ranks_that_have_joined_change_nothing() -> None:
    """They give zeros, which have no direction, whatever ranks they are."""
    own = [np.array([3.0, 4.0]), np.array([1.0, 0.0]), np.array([2.0, 2.0])]

    def run(communicator: Communicator) -> list[NDArray]:
        results = []
        if communicator.rank % 2 == 0:
            results = communicator.grouped_allreduce([own[communicator.rank // 2], np.ones(1)], Reduction.ADASUM)
            out = own[communicator.rank // 2].copy()
            results.append(communicator.allreduce(out, Reduction.ADASUM, out=out))
        joining.join(communicator, {})
        return results

    for results in run_threads(run, 5)[::2]:
        for result in results[::2]:
            np.testing.assert_allclose(result, combined([own[0], own[1], own[2]]))
        np.testing.assert_allclose(results[1], [1.0])
