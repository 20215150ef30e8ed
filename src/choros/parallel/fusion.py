"""Many small arrays in a few large buffers: the plan, and the buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.parallel.compression import Compressor

__all__ = ["PIECE_BYTES", "Bucket", "FusionBuffers", "Slot", "plan_fusion"]

Array = NDArray[Any]
#: The shape and dtype of each array.
Layout = tuple[tuple[tuple[int, ...], np.dtype[np.generic]], ...]

#: A message of this size still fits the caches; Open MPI moves 64 MiB so in a third of the time of one call.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Slot:
    """Where array ``index`` lies in its bucket: items ``start … stop - 1``."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Arrays that travel in one buffer of ``size`` items of ``dtype``, cut into ``pieces``."""

    dtype: np.dtype[np.generic]
    slots: tuple[Slot, ...]
    size: int
    pieces: tuple[tuple[int, int], ...]


def plan_fusion(
    layout: Layout, groups: Sequence[Sequence[int]], compressor: Compressor, piece_bytes: int = PIECE_BYTES
) -> tuple[Bucket, ...]:
    """Which array goes where. The same on every rank, being a pure function of what all ranks agree on.

    Args:
        layout: the arrays.
        groups: indices of arrays that travel together; one bucket a group and wire dtype.
        compressor: the dtype in which each array travels.
        piece_bytes: the most that goes into one message.

    Example:
        >>> from choros.parallel.compression import Compression
        >>> float32 = np.dtype("float32")
        >>> (bucket,) = plan_fusion((((2,), float32), ((3,), float32)), [[0, 1]], Compression.none, 16)
        >>> [(slot.start, slot.stop) for slot in bucket.slots], bucket.pieces
        ([(0, 2), (2, 5)], ((0, 4), (4, 5)))
    """
    buckets = []
    for group in groups:
        wires = [compressor.wire_dtype(layout[index][1]) for index in group]
        for wire in dict.fromkeys(wires):
            slots, size = [], 0
            for index, dtype in zip(group, wires, strict=True):
                if dtype == wire:
                    stop = size + int(np.prod(layout[index][0], dtype=np.int64))
                    slots.append(Slot(index, size, stop))
                    size = stop
            step = max(1, piece_bytes // wire.itemsize)
            pieces = tuple((start, min(start + step, size)) for start in range(0, size, step))
            buckets.append(Bucket(wire, tuple(slots), size, pieces))
    return tuple(buckets)


@final
class FusionBuffers:
    """One lasting buffer a bucket, so that no memory is asked for while training."""

    def __init__(self, layout: Layout, buckets: Sequence[Bucket]) -> None:
        self._layout = layout
        self._buckets = tuple(buckets)
        self._buffers = [np.empty(bucket.size, bucket.dtype) for bucket in buckets]

    def pack(self, arrays: Sequence[Array] | None, scale: float) -> None:
        """Copies ``arrays`` times ``scale`` into the buffers; ``None`` stands for zeros."""
        for bucket, buffer in zip(self._buckets, self._buffers, strict=True):
            if arrays is None:
                buffer.fill(0)
                continue
            for slot in bucket.slots:
                _scale_into(buffer[slot.start : slot.stop], arrays[slot.index].reshape(-1), scale)

    def reduce(self, reduce_in_place: Callable[[Array], None]) -> None:
        """Hands each piece of each buffer to ``reduce_in_place``, in the order of the plan."""
        for bucket, buffer in zip(self._buckets, self._buffers, strict=True):
            for start, stop in bucket.pieces:
                reduce_in_place(buffer[start:stop])

    def unpack(self, scale: float) -> list[Array]:
        """New arrays of what lies in the buffers, times ``scale``."""
        results: list[Array] = [np.empty(0)] * len(self._layout)
        for bucket, buffer in zip(self._buckets, self._buffers, strict=True):
            for slot in bucket.slots:
                shape, dtype = self._layout[slot.index]
                results[slot.index] = np.empty(shape, dtype)
                _scale_into(results[slot.index].reshape(-1), buffer[slot.start : slot.stop], scale)
        return results


def _scale_into(target: Array, source: Array, scale: float) -> None:
    """``target = source * scale``, multiplied in the wider of the two formats."""
    if scale == 1.0:
        np.copyto(target, source, casting="unsafe")
    elif source.itemsize >= target.itemsize:
        np.multiply(source, source.dtype.type(scale), out=target, casting="unsafe")
    else:
        np.copyto(target, source, casting="unsafe")
        np.multiply(target, target.dtype.type(scale), out=target)
