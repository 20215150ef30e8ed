import numpy as np
import pytest

from choros.comm import BFLOAT16
from choros.parallel.compression import Compression, Compressor
from choros.parallel.fusion import Bucket, FusionBuffers, Layout, Slot, plan_fusion

FLOAT16, FLOAT32, FLOAT64, INT32 = (np.dtype(name) for name in ("float16", "float32", "float64", "int32"))
LAYOUT: Layout = (((2, 2), FLOAT32), ((), FLOAT64), ((3,), FLOAT32), ((0, 4), FLOAT32), ((5,), BFLOAT16))
TOGETHER = [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("compressor", "wires"),
    [
        (Compression.none, {FLOAT16: FLOAT16, FLOAT32: FLOAT32, FLOAT64: FLOAT64, BFLOAT16: FLOAT32, INT32: INT32}),
        (Compression.fp16, {FLOAT16: FLOAT16, FLOAT32: FLOAT16, FLOAT64: FLOAT16, BFLOAT16: FLOAT16, INT32: INT32}),
    ],
    ids=["none", "fp16"],
)
def test_dtype_in_which_arrays_travel(compressor: Compressor, wires: dict[np.dtype, np.dtype]) -> None:
    assert {dtype: compressor.wire_dtype(dtype) for dtype in wires} == wires


def test_arrays_of_one_wire_dtype_share_a_bucket() -> None:
    slots = (Slot(0, 0, 4), Slot(2, 4, 7), Slot(3, 7, 7), Slot(4, 7, 12))
    assert plan_fusion(LAYOUT, TOGETHER, Compression.none) == (
        Bucket(FLOAT32, slots, 12, ((0, 12),)),
        Bucket(FLOAT64, (Slot(1, 0, 1),), 1, ((0, 1),)),
    )


def test_compressed_arrays_all_share_one_bucket() -> None:
    slots = (Slot(0, 0, 4), Slot(1, 4, 5), Slot(2, 5, 8), Slot(3, 8, 8), Slot(4, 8, 13))
    assert plan_fusion(LAYOUT, TOGETHER, Compression.fp16) == (Bucket(FLOAT16, slots, 13, ((0, 13),)),)


def test_groups_do_not_share_buckets() -> None:
    assert plan_fusion(LAYOUT, [[2], [0, 4], []], Compression.none) == (
        Bucket(FLOAT32, (Slot(2, 0, 3),), 3, ((0, 3),)),
        Bucket(FLOAT32, (Slot(0, 0, 4), Slot(4, 4, 9)), 9, ((0, 9),)),
    )


@pytest.mark.parametrize(
    ("piece_bytes", "pieces"),
    [
        (1, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))),
        (8, ((0, 2), (2, 4), (4, 5))),
        (11, ((0, 2), (2, 4), (4, 5))),
        (20, ((0, 5),)),
        (1 << 20, ((0, 5),)),
    ],
)
def test_pieces_cover_the_bucket(piece_bytes: int, pieces: tuple[tuple[int, int], ...]) -> None:
    (bucket,) = plan_fusion((((5,), FLOAT32),), [[0]], Compression.none, piece_bytes)
    assert bucket.pieces == pieces


def test_array_without_items_makes_no_message() -> None:
    assert plan_fusion((((0,), FLOAT32),), [[0]], Compression.none) == (Bucket(FLOAT32, (Slot(0, 0, 0),), 0, ()),)


@pytest.mark.parametrize("compressor", [Compression.none, Compression.fp16], ids=["none", "fp16"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 4.0)])
@pytest.mark.parametrize("groups", [TOGETHER, [[4, 0], [1, 3, 2]]])
def test_what_is_packed_is_unpacked(
    groups: list[list[int]], scales: tuple[float, float], compressor: Compressor
) -> None:
    arrays = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape, dtype in LAYOUT]
    buffers = FusionBuffers(LAYOUT, plan_fusion(LAYOUT, groups, compressor, piece_bytes=8))
    buffers.pack([array[::-1].copy()[::-1] if array.ndim else array for array in arrays], scales[0])

    def double(piece: np.ndarray) -> None:
        piece *= 2

    buffers.reduce(double)
    for array, result in zip(arrays, buffers.unpack(scales[1]), strict=True):
        assert (result.dtype, result.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(result, array * array.dtype.type(2 * scales[0] * scales[1]))


def test_nothing_to_give_is_zeros() -> None:
    buffers = FusionBuffers(LAYOUT, plan_fusion(LAYOUT, TOGETHER, Compression.none))
    buffers.pack([np.ones(shape, dtype) for shape, dtype in LAYOUT], 1.0)
    buffers.pack(None, 1.0)
    assert not any(result.any() for result in buffers.unpack(1.0))


def test_scaling_is_done_in_the_wider_format() -> None:
    # In float16 the sum of the ranks' 60000 would be infinite, in float32 1e-7 / 2 is no zero.
    layout: Layout = (((2,), FLOAT32),)
    buffers = FusionBuffers(layout, plan_fusion(layout, [[0]], Compression.fp16))
    buffers.pack([np.array([120000, 6e4], np.float32)], 0.5)
    assert buffers.unpack(2.0)[0].tolist() == [120000, 60000]
