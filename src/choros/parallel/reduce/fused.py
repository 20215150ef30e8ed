"""Fusion: many arrays are summed in one message, uncompressed or cast to another dtype."""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from choros.comm import Communicator, Reduction
from choros.comm.fusion import Chunk, FusionBuffer, Layout, WireDtype, aligned_empty, pack, parts, plan_fusion, views
from choros.parallel.reduce.exchange import Array, Exchange


@final
class FusedExchange(Exchange):
    """Sums by an allreduce; each gradient is scaled and copied into the message once, and copied out of it once."""

    def __init__(
        self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]], wire_dtype: WireDtype
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
            for part in parts(chunk, targets):
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
            elif before == 1.0:
                pack(chunk, flats, message)
            elif buffer.wire.itemsize < buffer.dtype.itemsize:
                _pack_scaled(parts(chunk, flats), message, before)
            else:
                pack(chunk, flats, message)
                np.multiply(message, message.dtype.type(before), out=message)

        self._communicator.reduce_chunks(buffer, Reduction.SUM, fill, drain)


def _pack_scaled(given: Sequence[Array], target: Array, scale: float) -> None:
    """Scales before the cast to a narrower dtype: values that overflow it may fit after scaling."""
    start = 0
    for part in given:
        _scale_into(target[start : start + part.size], part, scale)
        start += part.size


def _scale_into(target: Array, source: Array, scale: float) -> None:
    """Computes ``target = source * scale`` in the wider of the two dtypes."""
    if scale == 1.0:
        np.copyto(target, source, casting="unsafe")
    elif source.itemsize >= target.itemsize:
        np.multiply(source, source.dtype.type(scale), out=target, casting="unsafe")
    else:
        np.copyto(target, source, casting="unsafe")
        np.multiply(target, target.dtype.type(scale), out=target)
