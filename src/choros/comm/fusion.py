"""Fusion: many small arrays in few messages. The plan says which item is sent in which message, and chunks are reduced
by it, one packed, reduced and unpacked before the next is touched, so that its bytes leave the cache only once::

    arrays    a a a a a a a a│c│d d│b b b                 pack: one concatenation per chunk
    chunks   └─ 0 ─┘└─ 1 ─┘ └── 2 ──┘└─ 3 ─┘              of a large array: none, it is reduced where its result is
    result    a a a a a a a a│c│d d│b b b                 unpack: one copy per chunk; each array is a view of the buffer
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from choros.comm.members import Members
from choros.comm.primitives import CHUNK_BYTES
from choros.comm.reduction import Array, DType, Reduction, wide_dtype, working_op

#: The shape and dtype of each array.
Layout = tuple[tuple[tuple[int, ...], DType], ...]
#: Maps the dtype of an array to the dtype in which it is sent.
WireDtype = Callable[[DType], DType]
#: Arrays as an exchange takes them: host arrays, tensors on a device or ``SparseRows``.
Given: TypeAlias = Sequence[Any] | None

#: A smaller chunk is as slow, and may not hold an item.
_LEAST_BYTES = 4 << 10


def chunk_bytes(requested: int | None) -> int:
    """Returns the size of chunks for a value of ``CHOROS_FUSION_BYTES``; ``None`` or 0 for the default.

    >>> chunk_bytes(None), chunk_bytes(64 << 20), chunk_bytes(1)
    (4194304, 67108864, 4096)
    """
    return max(requested, _LEAST_BYTES) if requested else CHUNK_BYTES


@dataclass(frozen=True)
class Span:
    """Items ``start … stop - 1`` of array ``index``, or of a buffer, which hold this array."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """Items ``start … stop - 1`` of a buffer, which are sent in one message: the concatenation of ``slices``. If it is
    ``direct``, they are of one array, and reduced in the memory of the result.
    """

    start: int
    stop: int
    slices: tuple[Span, ...]
    direct: bool = False

    @classmethod
    def of(cls, slots: Sequence[Span], start: int, stop: int, *, direct: bool = False) -> Self:
        """Items of a buffer in which arrays fill ``slots``."""
        within = [slot for slot in slots if slot.start < stop and slot.stop > start]
        slices = [Span(s.index, max(start - s.start, 0), min(stop, s.stop) - s.start) for s in within]
        return cls(start, stop, tuple(slices), direct)

    def parts(self, flats: Sequence[Array]) -> list[Array]:
        """The parts of the arrays, all flat, whose concatenation it is."""
        return [flats[s.index][s.start : s.stop] for s in self.slices]


@dataclass(frozen=True)
class FusionBuffer:
    """Arrays of one ``dtype`` that are sent together as ``wire``, with ``size`` items in total."""

    dtype: DType
    wire: DType
    size: int
    slots: tuple[Span, ...]
    chunks: tuple[Chunk, ...]


def plan_fusion(
    layout: Layout,
    groups: Sequence[Sequence[int]],
    wire_dtype: WireDtype,
    chunk_bytes: int,
    direct_bytes: int | None = None,
) -> tuple[FusionBuffer, ...]:
    """Plans buffers of one group and dtype, the same on every rank; arrays that would break alignment come last, large
    ones first. Those of ``direct_bytes`` and more, and one alone, are reduced where their results are, if sent as is.

    >>> float32 = np.dtype("float32")
    >>> (buffer,) = plan_fusion((((2,), float32), ((3,), float32)), [[0, 1]], lambda dtype: dtype, 16)
    >>> for chunk in buffer.chunks:
    ...     print(chunk.stop - chunk.start, [(s.index, s.start, s.stop) for s in chunk.slices])
    4 [(0, 0, 2), (1, 0, 2)]
    1 [(1, 2, 3)]
    """
    buffers = []
    for group in groups:
        for dtype in dict.fromkeys(layout[index][1] for index in group):
            sizes = {index: math.prod(layout[index][0]) for index in group if layout[index][1] == dtype}
            wire = wire_dtype(dtype)
            least = math.inf
            if direct_bytes is not None and wire == dtype:
                least = direct_bytes / dtype.itemsize if len(sizes) > 1 else 0
            order = sorted(sizes, key=lambda i: (sizes[i] * dtype.itemsize % ALIGNMENT != 0, sizes[i] < least))
            slots = tuple(slots_of((index, sizes[index]) for index in order))
            most = max(1, chunk_bytes // wire.itemsize)
            chunks = tuple(_chunks(slots, most, least))
            buffers.append(FusionBuffer(dtype, wire, sum(sizes.values()), slots, chunks))
    return tuple(buffers)


def slots_of(sizes: Iterable[tuple[int, int]]) -> Iterator[Span]:
    """Where arrays are in a buffer that has one after the other; ``sizes``: their indices and numbers of items."""
    start = 0
    for index, size in sizes:
        yield Span(index, start, start + size)
        start += size


def _chunks(slots: Sequence[Span], most: int, least: float) -> Iterator[Chunk]:
    """Chunks of at most ``most`` items, those of arrays of ``least`` items and more apart from the others."""
    for is_large, run in itertools.groupby(slots, lambda slot: slot.stop - slot.start >= least):
        spans_of_run = [*run]
        for spans in [[slot] for slot in spans_of_run] if is_large else [spans_of_run]:
            for start in range(spans[0].start, spans[-1].stop, most):
                yield Chunk.of(spans, start, min(start + most, spans[-1].stop), direct=is_large)


def reduce_buffers(
    members: Members,
    layout: Layout,
    buffers: Sequence[FusionBuffer],
    op: Reduction,
    fill: Callable[[Chunk, Array], None],
    write: Callable[[Array, Array], None],
    out: Sequence[Array] | None,
) -> list[Array]:
    """Reduces arrays of ``layout`` by chunks, into ``out``, which is contiguous, or new ones; unchecked: in
    ``exclusive()``, after ``agree``. ``fill`` writes a message; ``write`` converts parts of it to results, or itself.
    """
    results = [np.empty(0)] * len(layout) if out is None else list(out)
    given = [] if out is None else [flat_items(array) for array in out]
    for buffer in buffers:
        engine_op = working_op(buffer.dtype, op)
        flat = aligned_empty((buffer.size,), buffer.dtype) if out is None else None
        for chunk in buffer.chunks:
            targets = chunk.parts(given) if flat is None else [flat[chunk.start : chunk.stop]]
            if chunk.direct:
                message = targets[0]
                fill(chunk, message)
                members._allreduce_anywhere(message, engine_op)
            else:
                message = members.message((chunk.stop - chunk.start) * buffer.wire.itemsize).view(buffer.wire)
                fill(chunk, message)
                members._allreduce(message, engine_op)
            members.bytes_sent += message.nbytes
            start = 0
            for target in targets:
                write(message if chunk.direct else message[start : start + target.size], target)
                start += target.size
        if flat is not None:
            views(buffer, flat, layout, results)
    return results


def flat_items(array: Array) -> Array:
    """The items of an array, one after the other; booleans as bytes."""
    flat = array.ravel()
    return flat.view(np.uint8) if flat.dtype.kind == "b" else flat


def pack(flats: Sequence[Array], chunk: Chunk, message: Array) -> None:
    """Writes a chunk's items, cast, to ``message``, where those of a direct one may be already."""
    parts = chunk.parts(flats)
    if not chunk.direct or message.__array_interface__["data"] != parts[0].__array_interface__["data"]:
        np.concatenate(parts, out=message, casting="unsafe")


def views(buffer: FusionBuffer, flat: Array, layout: Layout, results: list[Array]) -> None:
    """Stores views of the arrays in ``flat``, the whole buffer, at their indices in ``results``."""
    for slot in buffer.slots:
        results[slot.index] = flat[slot.start : slot.stop].reshape(layout[slot.index][0])


@dataclass(frozen=True)
class Exchange:
    """Sums arrays of one layout over the ranks of one communicator; created once, used in every step.

    All ranks call ``sum`` within the exclusive section in which they have agreed on the step. It owns the state that it
    keeps from step to step (buffers, the residual of a compression).

    Attributes:
        description: how it sums. Ranks compare it before the first byte is sent.
        sum: ``sum(arrays, before, after, out=None)`` returns the sum over the ranks of ``arrays * before``, times
            ``after``: arrays of the layout's shapes and dtypes, the same on every rank. ``arrays`` are this rank's,
            which are not written to; ``None`` for zeros, of a rank that has no gradients. ``before``: its share of the
            examples; ``after`` is the same on every rank. ``out``: where results may be written, maybe ``arrays``.
    """

    description: str
    sum: Callable[..., list[Any]]


def fused_exchange(
    communicator: Members, layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype
) -> Exchange:
    """Sums arrays by allreduces, as they are or cast; each is scaled and copied into a message once, and out of it
    once. In place, it writes a chunk where it has just read it, and it is still in the caches.
    """
    buffers = plan_fusion(layout, groups, wire_dtype, communicator.chunk_bytes, communicator.direct_bytes)

    def reduce(arrays: Given, before: float, after: float, out: Given = None) -> list[Array]:
        if out is not None and not all(array.flags.c_contiguous for array in out):
            out = None
        flats = None if arrays is None else [array.reshape(-1) for array in arrays]

        def fill(chunk: Chunk, message: Array) -> None:
            if flats is None:
                message.fill(0)
            elif before != 1.0 and message.itemsize < flats[chunk.slices[0].index].itemsize:
                # Before the cast: values that overflow the narrower dtype may fit after scaling.
                concatenate_scaled(chunk.parts(flats), message, before)
            else:
                pack(flats, chunk, message)
                scale_into(message, message, before)

        def write(message: Array, target: Array) -> None:
            scale_into(target, message, after)

        return reduce_buffers(communicator, layout, buffers, Reduction.SUM, fill, write, out)

    return Exchange(", ".join(f"{buffer.wire}[{buffer.size}]" for buffer in buffers), reduce)


def concatenate_scaled(parts: Sequence[Array], out: Array, scale: float) -> None:
    """Writes flat ``parts`` times ``scale`` to ``out``, one after the other."""
    start = 0
    for part in parts:
        scale_into(out[start : start + part.size], part, scale)
        start += part.size


def scale_into(target: Array, source: Array, scale: float) -> None:
    """Computes ``target = source * scale`` in the wider of the two dtypes, float32 or wider, and rounds once."""
    if target is not source and (scale == 1.0 or source.itemsize < target.itemsize):
        np.copyto(target, source, casting="unsafe")
        source = target
    if scale != 1.0:
        np.multiply(source, scale, out=target, dtype=wide_dtype(source.dtype), casting="unsafe")


def batches(sizes: Sequence[int], chunk_bytes: int) -> Iterator[slice]:
    """Yields which arrays are sent in one message: neighbours of at most ``chunk_bytes``, or one.

    >>> [(batch.start, batch.stop) for batch in batches([3, 3, 9, 1], 8)]
    [(0, 2), (2, 3), (3, 4)]
    """
    first, filled = 0, 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > chunk_bytes:
            yield slice(first, index)
            first, filled = index, 0
        filled += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def regrouped(received: NDArray[np.uint8], counts: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """Returns the concatenation of the ranks' parts of each array, whose ``counts`` are ``(ranks, arrays)``::

    received   a0 b0 │ a1 b1 │ a2 b2        ──►   [a0 a1 a2], [b0 b1 b2]

    >>> [part.tolist() for part in regrouped(np.arange(5, dtype=np.uint8), np.array([[1, 2], [1, 1]]))]
    [[0, 3], [1, 2, 4]]
    """
    if counts.shape[1] == 1:
        return [received]
    ends = np.cumsum(counts)
    edges = np.stack([ends - counts.reshape(-1), ends], axis=1).reshape(*counts.shape, 2)
    results = [aligned_empty((size,), received.dtype) for size in counts.sum(0).tolist()]
    for result, of_ranks in zip(results, edges.swapaxes(0, 1).tolist(), strict=True):
        np.concatenate([received[start:stop] for start, stop in of_ranks], out=result)
    return results


#: TensorFlow and XLA use memory in place if it begins at a multiple of this number of bytes, and copy it otherwise.
ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: DType) -> Array:
    """An uninitialised array whose memory begins at a multiple of ``ALIGNMENT`` bytes.

    >>> array = aligned_empty((3, 5), np.dtype("float32"))
    >>> array.shape, array.ctypes.data % ALIGNMENT
    ((3, 5), 0)
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
