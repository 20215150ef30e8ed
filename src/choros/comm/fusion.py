"""Many arrays in few messages: which item travels where, and how it gets there.

Arrays of one dtype are laid end to end in a bucket, which is cut into pieces, each small enough for the caches. A piece
is packed, reduced and unpacked before the next is touched, so that its bytes leave the cache only once::

    arrays    a a a a a a a a│b b│c c c c c c c c        pack: one concatenation a piece
    pieces   └──── 0 ────┘└──── 1 ────┘└── 2 ──┘
    result    a a a a a a a a│b b│c c c c c c c c        unpack: one copy a piece; each array is a view of the bucket
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.comm.memory import ALIGNMENT

__all__ = ["PIECE_BYTES", "Bucket", "Layout", "Part", "Piece", "Slot", "WireDtype", "pack", "plan_fusion", "views"]

Array = NDArray[Any]
#: The shape and dtype of each array.
Layout = tuple[tuple[tuple[int, ...], np.dtype[np.generic]], ...]
#: The dtype in which arrays of another dtype travel.
WireDtype = Callable[[np.dtype[np.generic]], np.dtype[np.generic]]

#: A piece of this size still fits the caches.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Slot:
    """Where array ``index`` lies in its bucket."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """Items ``start … stop - 1`` of array ``index``."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """Items ``start … stop - 1`` of a bucket, which travel in one message; ``parts`` lie in it end to end."""

    start: int
    stop: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Bucket:
    """Arrays of one ``dtype`` that travel together as ``wire``, ``size`` items in all."""

    dtype: np.dtype[np.generic]
    wire: np.dtype[np.generic]
    size: int
    slots: tuple[Slot, ...]
    pieces: tuple[Piece, ...]


def plan_fusion(
    layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype, piece_bytes: int
) -> tuple[Bucket, ...]:
    """Which array goes where. The same on every rank, being a pure function of what all ranks agree on.

    In a bucket, arrays whose size spoils the alignment of what follows come last.

    Args:
        layout: the arrays.
        groups: indices of arrays that travel together: a bucket holds arrays of one group and dtype.
        wire_dtype: the dtype in which each array travels.
        piece_bytes: the most that goes into one message.

    Example:
        >>> float32 = np.dtype("float32")
        >>> (bucket,) = plan_fusion((((2,), float32), ((3,), float32)), [[0, 1]], lambda dtype: dtype, 16)
        >>> for piece in bucket.pieces:
        ...     print(piece.stop - piece.start, [(part.index, part.start, part.stop) for part in piece.parts])
        4 [(0, 0, 2), (1, 0, 2)]
        1 [(1, 2, 3)]
    """
    buckets = []
    for group in groups:
        for dtype in dict.fromkeys(layout[index][1] for index in group):
            sizes = {index: math.prod(layout[index][0]) for index in group if layout[index][1] == dtype}
            order = sorted(sizes, key=lambda index: sizes[index] * dtype.itemsize % ALIGNMENT != 0)
            slots, size = [], 0
            for index in order:
                slots.append(Slot(index, size, size + sizes[index]))
                size += sizes[index]
            wire = wire_dtype(dtype)
            most = max(1, piece_bytes // wire.itemsize)
            pieces = tuple(_piece(slots, start, min(start + most, size)) for start in range(0, size, most))
            buckets.append(Bucket(dtype, wire, size, tuple(slots), pieces))
    return tuple(buckets)


def _piece(slots: Sequence[Slot], start: int, stop: int) -> Piece:
    within = [slot for slot in slots if slot.start < stop and slot.stop > start]
    parts = [Part(s.index, max(start - s.start, 0), min(stop, s.stop) - s.start) for s in within]
    return Piece(start, stop, tuple(parts))


def pack(piece: Piece, flats: Sequence[Array], target: Array) -> None:
    """Copies what travels in ``piece`` from the arrays, all flat, to ``target``."""
    np.concatenate([flats[part.index][part.start : part.stop] for part in piece.parts], out=target, casting="unsafe")


def views(bucket: Bucket, flat: Array, layout: Layout, results: list[Array]) -> None:
    """Puts the arrays that lie in ``flat``, the whole bucket, in their places in ``results``."""
    for slot in bucket.slots:
        results[slot.index] = flat[slot.start : slot.stop].reshape(layout[slot.index][0])
