import numpy as np
import pytest

from choros.comm.fusion import Chunk, FusionBuffer, Layout, Span, plan_fusion, views

FLOAT16, FLOAT32, FLOAT64 = (np.dtype(name) for name in ("float16", "float32", "float64"))
LAYOUT: Layout = (((2, 2), FLOAT32), ((), FLOAT64), ((3,), FLOAT32), ((0, 4), FLOAT32), ((4, 4), FLOAT32))
TOGETHER = [[0, 1, 2, 3, 4]]


def as_is(dtype: np.dtype) -> np.dtype:
    return dtype


def test_arrays_of_one_dtype_share_a_fusion_buffer_aligned_ones_first() -> None:
    floats = (Span(3, 0, 0), Span(4, 0, 16), Span(0, 16, 20), Span(2, 20, 23))
    slices = (Span(4, 0, 16), Span(0, 0, 4), Span(2, 0, 3))
    assert plan_fusion(LAYOUT, TOGETHER, as_is, 1 << 20) == (
        FusionBuffer(FLOAT32, FLOAT32, 23, floats, (Chunk(0, 23, slices),)),
        FusionBuffer(FLOAT64, FLOAT64, 1, (Span(1, 0, 1),), (Chunk(0, 1, (Span(1, 0, 1),)),)),
    )


def test_a_smaller_wire_dtype_makes_fewer_chunks() -> None:
    whole, half = (plan_fusion(LAYOUT, [[4]], wire, 32)[0] for wire in (as_is, lambda dtype: FLOAT16))
    assert (len(whole.chunks), len(half.chunks), half.wire) == (2, 1, FLOAT16)


def test_groups_do_not_share_buffers() -> None:
    assert [[slot.index for slot in buffer.slots] for buffer in plan_fusion(LAYOUT, [[2], [0, 4], []], as_is, 64)] == [
        [2],
        [4, 0],
    ]


@pytest.mark.parametrize("chunk_bytes", [1, 4, 8, 11, 20, 1 << 20])
def test_packed_arrays_are_unpacked(chunk_bytes: int) -> None:
    arrays = [
        np.random.default_rng(index).normal(size=shape).astype(dtype) for index, (shape, dtype) in enumerate(LAYOUT)
    ]
    results: list[np.ndarray] = [np.empty(0)] * len(arrays)
    for buffer in plan_fusion(LAYOUT, TOGETHER, as_is, chunk_bytes):
        flat = np.full(buffer.size, np.nan, buffer.dtype)
        for chunk in buffer.chunks:
            assert (chunk.stop - chunk.start) * buffer.wire.itemsize <= max(chunk_bytes, buffer.wire.itemsize)
            parts = chunk.parts([array.reshape(-1) for array in arrays])
            np.concatenate(parts, out=flat[chunk.start : chunk.stop], casting="unsafe")
        views(buffer, flat, LAYOUT, results)
    for array, result in zip(arrays, results, strict=True):
        np.testing.assert_array_equal(result, array, strict=True)


def test_empty_array_has_no_chunks() -> None:
    (buffer,) = plan_fusion((((0,), FLOAT32),), [[0]], as_is, 4)
    assert buffer.chunks == ()


def test_large_arrays_are_reduced_where_they_are() -> None:
    layout: Layout = (((16,), FLOAT32), ((64,), FLOAT32), ((16,), FLOAT32), ((65,), FLOAT32), ((3,), FLOAT32))
    (buffer,) = plan_fusion(layout, TOGETHER, as_is, 160, 256)
    assert [(chunk.direct, [(s.index, s.start, s.stop) for s in chunk.slices]) for chunk in buffer.chunks] == [
        (True, [(1, 0, 40)]),
        (True, [(1, 40, 64)]),
        (False, [(0, 0, 16), (2, 0, 16)]),
        (True, [(3, 0, 40)]),
        (True, [(3, 40, 65)]),
        (False, [(4, 0, 3)]),
    ]
    (buffer,) = plan_fusion(layout, TOGETHER, lambda dtype: FLOAT16, 160, 256)
    assert not any(chunk.direct for chunk in buffer.chunks)
