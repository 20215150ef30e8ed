"""Fusion: many arrays in few messages. The plan says which item is sent in which message, and chunks are reduced by
it, one packed, reduced and unpacked before the next is touched, so that its bytes leave the cache only once::

    arrays    a a a a a a a a│b b│c c c c c c c c        pack: one concatenation per chunk
    chunks   └──── 0 ────┘└──── 1 ────┘└── 2 ──┘
    result    a a a a a a a a│b b│c c c c c c c c        unpack: one copy per chunk; each array is a view of the buffer
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.comm.members import Members
from choros.comm.primitives import CHUNK_BYTES, Array
from choros.comm.reduction import Reduction

#: The shape and dtype of each array.
Layout = tuple[tuple[tuple[int, ...], np.dtype[np.generic]], ...]
#: Maps the dtype of an array to the dtype in which it is sent.
WireDtype = Callable[[np.dtype[np.generic]], np.dtype[np.generic]]

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
    """Items ``start … stop - 1`` of a buffer, which are sent in one message: the concatenation of ``slices``."""

    start: int
    stop: int
    slices: tuple[Span, ...]

    def parts(self, flats: Sequence[Array]) -> list[Array]:
        """The parts of the arrays, all flat, whose concatenation it is."""
        return [flats[s.index][s.start : s.stop] for s in self.slices]


@dataclass(frozen=True)
class FusionBuffer:
    """Arrays of one ``dtype`` that are sent together as ``wire``, with ``size`` items in total."""

    dtype: np.dtype[np.generic]
    wire: np.dtype[np.generic]
    size: int
    slots: tuple[Span, ...]
    chunks: tuple[Chunk, ...]


def plan_fusion(
    layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype, chunk_bytes: int
) -> tuple[FusionBuffer, ...]:
    """Plans buffers of one group and dtype, the same on every rank; arrays that would break alignment come last.

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
            order = sorted(sizes, key=lambda index: sizes[index] * dtype.itemsize % ALIGNMENT != 0)
            slots, size = [], 0
            for index in order:
                slots.append(Span(index, size, size + sizes[index]))
                size += sizes[index]
            wire = wire_dtype(dtype)
            most = max(1, chunk_bytes // wire.itemsize)
            chunks = tuple(_chunk(slots, start, min(start + most, size)) for start in range(0, size, most))
            buffers.append(FusionBuffer(dtype, wire, size, tuple(slots), chunks))
    return tuple(buffers)


def _chunk(slots: Sequence[Span], start: int, stop: int) -> Chunk:
    within = [slot for slot in slots if slot.start < stop and slot.stop > start]
    slices = [Span(s.index, max(start - s.start, 0), min(stop, s.stop) - s.start) for s in within]
    return Chunk(start, stop, tuple(slices))


def reduce_chunks(
    members: Members,
    buffer: FusionBuffer,
    op: Reduction,
    fill: Callable[[Chunk, Array], None],
    empty: Callable[[Array, Chunk], None],
) -> None:
    """Reduces a fusion buffer by chunks, not by ``AVERAGE``; unchecked: in ``exclusive()``, after ``agree``."""
    if members.scratch is None or members.scratch.nbytes < members.chunk_bytes:  # chunks have become larger
        members.scratch = members._allocate(members.chunk_bytes)
    for chunk in buffer.chunks:
        message = members.scratch[: (chunk.stop - chunk.start) * buffer.wire.itemsize].view(buffer.wire)
        fill(chunk, message)
        members.bytes_sent += message.nbytes
        members._allreduce(message, op)
        empty(message, chunk)


def views(buffer: FusionBuffer, flat: Array, layout: Layout, results: list[Array]) -> None:
    """Stores views of the arrays in ``flat``, the whole buffer, at their indices in ``results``."""
    for slot in buffer.slots:
        results[slot.index] = flat[slot.start : slot.stop].reshape(layout[slot.index][0])


@final
class FusedExchange:
    """Sums arrays by allreduces, as they are or cast; each is scaled and copied into a message once, and out of it
    once. An ``Exchange`` of gradients (``parallel/reduce``).
    """

    def __init__(
        self, communicator: Members, layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype
    ) -> None:
        self._communicator = communicator
        self._layout = layout
        self._buffers = plan_fusion(layout, groups, wire_dtype, communicator.chunk_bytes)
        self.description = ", ".join(f"{buffer.wire}[{buffer.size}]" for buffer in self._buffers)

    def sum(self, arrays: Sequence[Array] | None, before: float, after: float) -> list[Array]:
        """See ``Exchange``."""
        flats = None if arrays is None else [array.reshape(-1) for array in arrays]
        results: list[Array] = [np.empty(0)] * len(self._layout)
        for buffer in self._buffers:
            flat = aligned_empty((buffer.size,), buffer.dtype)

            def drain(message: Array, chunk: Chunk, flat: Array = flat) -> None:
                _scale_into(flat[chunk.start : chunk.stop], message, after)

            self._sum(buffer, flats, before, drain)
            views(buffer, flat, self._layout, results)
        return results

    def sum_into(self, out: Sequence[Array], arrays: Sequence[Array], before: float, after: float) -> list[Array]:
        """See ``Exchange``; in place, it writes a chunk where it has just read it, and it is still in the caches."""
        if not all(array.flags.c_contiguous for array in out):
            return self.sum(arrays, before, after)
        flats, targets = [array.reshape(-1) for array in arrays], [array.reshape(-1) for array in out]

        def drain(message: Array, chunk: Chunk) -> None:
            start = 0
            for part in chunk.parts(targets):
                _scale_into(part, message[start : start + part.size], after)
                start += part.size

        for buffer in self._buffers:
            self._sum(buffer, flats, before, drain)
        return list(out)

    def _sum(
        self,
        buffer: FusionBuffer,
        flats: Sequence[Array] | None,
        before: float,
        drain: Callable[[Array, Chunk], None],
    ) -> None:
        def fill(chunk: Chunk, message: Array) -> None:
            if flats is None:
                message.fill(0)
            elif before != 1.0 and buffer.wire.itemsize < buffer.dtype.itemsize:
                # Before the cast: values that overflow the narrower dtype may fit after scaling.
                start = 0
                for part in chunk.parts(flats):
                    _scale_into(message[start : start + part.size], part, before)
                    start += part.size
            else:
                np.concatenate(chunk.parts(flats), out=message, casting="unsafe")
                if before != 1.0:
                    np.multiply(message, message.dtype.type(before), out=message)

        reduce_chunks(self._communicator, buffer, Reduction.SUM, fill, drain)


def _scale_into(target: Array, source: Array, scale: float) -> None:
    """Computes ``target = source * scale`` in the wider of the two dtypes."""
    if scale == 1.0:
        np.copyto(target, source, casting="unsafe")
    elif source.itemsize >= target.itemsize:
        np.multiply(source, source.dtype.type(scale), out=target, casting="unsafe")
    else:
        np.copyto(target, source, casting="unsafe")
        np.multiply(target, target.dtype.type(scale), out=target)


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


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[Any]:
    """An uninitialised array whose memory begins at a multiple of ``ALIGNMENT`` bytes.

    >>> array = aligned_empty((3, 5), np.dtype("float32"))
    >>> array.shape, array.ctypes.data % ALIGNMENT
    ((3, 5), 0)
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
