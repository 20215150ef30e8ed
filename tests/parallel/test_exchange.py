"""Fused exchanges on one rank: arrays are packed and unpacked correctly for all sizes of chunks."""

import numpy as np
import pytest

from choros.comm import BFLOAT16
from choros.comm.engines.local import LocalCommunicator
from choros.comm.fusion import Layout
from choros.parallel.compression import Compression, Compressor

FLOAT16, FLOAT32, FLOAT64, INT32 = (np.dtype(name) for name in ("float16", "float32", "float64", "int32"))
LAYOUT: Layout = (((2, 2), FLOAT32), ((), FLOAT64), ((3,), FLOAT32), ((0, 4), FLOAT32), ((5,), BFLOAT16))
ONE_GROUP = [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("compressor", "wires"),
    [
        (Compression.none, {FLOAT16: FLOAT16, FLOAT32: FLOAT32, FLOAT64: FLOAT64, BFLOAT16: FLOAT32, INT32: INT32}),
        (Compression.fp16, {FLOAT16: FLOAT16, FLOAT32: FLOAT16, FLOAT64: FLOAT16, BFLOAT16: FLOAT16, INT32: INT32}),
    ],
    ids=["none", "fp16"],
)
def test_wire_dtype(compressor: Compressor, wires: dict[np.dtype, np.dtype]) -> None:
    assert {dtype: compressor.wire_dtype(dtype) for dtype in wires} == wires


@pytest.mark.parametrize("compressor", [Compression.none, Compression.fp16], ids=["none", "fp16"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 4.0)])
@pytest.mark.parametrize("groups", [ONE_GROUP, [[4, 0], [1, 3, 2]]])
@pytest.mark.parametrize("chunk_bytes", [8, 1 << 20])
def test_arrays_are_packed_and_unpacked(
    groups: list[list[int]], scales: tuple[float, float], compressor: Compressor, chunk_bytes: int
) -> None:
    communicator = LocalCommunicator()
    communicator.chunk_bytes = chunk_bytes
    arrays = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape, dtype in LAYOUT]
    strided = [array[::-1].copy()[::-1] if array.ndim else array for array in arrays]
    results = compressor.exchange(communicator, LAYOUT, groups).sum(strided, *scales)
    for array, result in zip(arrays, results, strict=True):
        assert (result.dtype, result.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(result, array * array.dtype.type(scales[0] * scales[1]))


@pytest.mark.parametrize("compressor", [Compression.none, Compression.fp16], ids=["none", "fp16"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 4.0)])
def test_sums_are_written_into_contiguous_arrays(scales: tuple[float, float], compressor: Compressor) -> None:
    communicator = LocalCommunicator()
    communicator.chunk_bytes = 8
    exchange = compressor.exchange(communicator, LAYOUT, ONE_GROUP)
    arrays = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape, dtype in LAYOUT]
    strided = [array[::-1].copy()[::-1] if array.ndim else array for array in arrays]
    expected = exchange.sum(arrays, *scales)
    others = [np.empty_like(array) for array in arrays]
    for given, out in ((arrays, strided), (strided, others), (arrays, arrays)):
        results = exchange.sum(given, *scales, out)
        assert [each is array for each, array in zip(results, out, strict=True)] == [out is not strided] * len(arrays)
        for result, array in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, array)


def test_no_arrays_count_as_zeros() -> None:
    exchange = Compression.none.exchange(LocalCommunicator(), LAYOUT, ONE_GROUP)
    exchange.sum([np.ones(shape, dtype) for shape, dtype in LAYOUT], 1.0, 1.0)
    assert not any(result.any() for result in exchange.sum(None, 1.0, 1.0))


def test_scaling_is_done_in_the_wider_dtype() -> None:
    # In float16 the sum of the ranks' 60000 would be infinite.
    exchange = Compression.fp16.exchange(LocalCommunicator(), (((2,), FLOAT32),), [[0]])
    assert exchange.sum([np.array([120000, 6e4], np.float32)], 0.5, 2.0)[0].tolist() == [120000, 60000]


@pytest.mark.parametrize("factors", [(1 / 11, 1.0), (1.0, 1 / 11)])
def test_factors_are_not_rounded_to_float16(factors: tuple[float, float]) -> None:
    exchange = Compression.none.exchange(LocalCommunicator(), (((3,), FLOAT16),), [[0]])
    assert exchange.sum([np.array([11, 22, 44], np.float16)], *factors)[0].tolist() == [1, 2, 4]
