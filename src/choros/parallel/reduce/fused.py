"""Fusion: many arrays are summed in one message, uncompressed or cast to another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from choros.comm import Communicator, ReduceOp
from choros.comm.fusion import Bucket, Piece, WireDtype, pack, plan_fusion, views
from choros.comm.memory import aligned_empty
from choros.parallel.reduce.exchange import Array, Exchange, Layout

__all__ = ["FusedExchange"]


@final
class FusedExchange(Exchange):
    """Sums by an allreduce; each gradient is scaled and copied into the message once, and copied out of it once."""

    def __init__(
        self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype
    ) -> None:
        self._communicator = communicator
        self._layout = layout
        self._buckets = plan_fusion(layout, groups, wire_dtype, communicator.piece_bytes)
        self.description = ", ".join(f"{bucket.wire}[{bucket.size}]" for bucket in self._buckets)

    def sum(self, arrays: Sequence[Array] | None, before: float, after: float) -> list[Array]:
        """See ``Exchange``."""
        flats = None if arrays is None else [array.reshape(-1) for array in arrays]
        results: list[Array] = [np.empty(0)] * len(self._layout)
        for bucket in self._buckets:
            flat = aligned_empty((bucket.size,), bucket.dtype)

            def fill(piece: Piece, message: Array, bucket: Bucket = bucket) -> None:
                if flats is None:
                    message.fill(0)
                elif before == 1.0:
                    pack(piece, flats, message)
                elif bucket.wire.itemsize < bucket.dtype.itemsize:
                    _pack_scaled(piece, flats, message, before)
                else:
                    pack(piece, flats, message)
                    np.multiply(message, message.dtype.type(before), out=message)

            def drain(message: Array, piece: Piece, flat: Array = flat) -> None:
                _scale_into(flat[piece.start : piece.stop], message, after)

            self._communicator.reduce_pieces(bucket, ReduceOp.SUM, fill, drain)
            views(bucket, flat, self._layout, results)
        return results


def _pack_scaled(piece: Piece, flats: Sequence[Array], target: Array, scale: float) -> None:
    """Scales before the cast to a narrower dtype: values that overflow it may fit after scaling."""
    start = 0
    for part in piece.parts:
        stop = start + part.stop - part.start
        _scale_into(target[start:stop], flats[part.index][part.start : part.stop], scale)
        start = stop


def _scale_into(target: Array, source: Array, scale: float) -> None:
    """Computes ``target = source * scale`` in the wider of the two dtypes."""
    if scale == 1.0:
        np.copyto(target, source, casting="unsafe")
    elif source.itemsize >= target.itemsize:
        np.multiply(source, source.dtype.type(scale), out=target, casting="unsafe")
    else:
        np.copyto(target, source, casting="unsafe")
        np.multiply(target, target.dtype.type(scale), out=target)
