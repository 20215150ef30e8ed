"""The int8 compression: one byte per element, and a scale for each block of elements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import numpy as np

from choros.comm import Communicator
from choros.parallel.compression.compressor import Compressor, DType, is_floating, reject_single_array
from choros.parallel.compression.selection import selective_exchange
from choros.parallel.compression.sliced import Bytes, Codec, SlicedSum
from choros.parallel.compression.vector import Vector, VectorExchange
from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["BLOCK", "Int8"]

#: The number of elements that share a scale: those below 1/254 of the largest are rounded to 0.
BLOCK = 256


@final
class _Int8Codec(Codec):
    """The scales of all blocks, then one byte per element: ``value = byte * scale``, ``scale = max |value| / 127``."""

    name = "int8"

    def nbytes(self, count: int) -> int:
        return 4 * _blocks(count) + count

    def encode(self, numbers: Vector) -> Bytes:
        blocks = np.zeros((_blocks(len(numbers)), BLOCK), np.float32)
        blocks.reshape(-1)[: len(numbers)] = numbers
        # A value that is not finite makes the scale not finite, and so reaches the other ranks.
        scales = np.abs(blocks).max(axis=1, initial=0) / np.float32(127)
        blocks /= np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
        codes = np.rint(blocks, out=blocks).astype(np.int8).reshape(-1)[: len(numbers)]
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])

    def decode(self, data: Bytes, count: int) -> Vector:
        start = 4 * _blocks(count)
        scales = np.repeat(data[:start].view(np.float32), BLOCK)[:count]
        return scales * data[start:].view(np.int8)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


@final
class Int8(Compressor):
    """Gradients are sent as int8, with a scale for each block of 256, and summed in float32, with error feedback.

    The blocks are those of Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861): a large element reduces the
    precision of its block only. The two rounds with error feedback in each are those of 1-bit Adam (Tang et al. 2021,
    https://arxiv.org/abs/2102.02888).
    """

    def wire_dtype(self, dtype: DType) -> DType:
        """See ``reject_single_array``."""
        return reject_single_array("int8", dtype)

    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """See ``Compressor``."""
        chosen = [index for index, (_, dtype) in enumerate(layout) if is_floating(dtype)]
        compressing = partial(
            VectorExchange, method=partial(SlicedSum, communicator, codec=_Int8Codec()), feedback=True
        )
        return selective_exchange(communicator, layout, groups, chosen, compressing)
