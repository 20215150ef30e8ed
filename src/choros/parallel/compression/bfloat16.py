"""The bf16 compression: two bytes per element, with the range of float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import numpy as np

from choros.comm import BFLOAT16, Communicator
from choros.parallel.compression.compressor import Compressor, DType, is_floating, reject_single_array
from choros.parallel.compression.selection import selective_exchange
from choros.parallel.compression.sliced import Bytes, Codec, SlicedSum
from choros.parallel.compression.vector import Vector, VectorExchange
from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["Bfloat16"]


@final
class _Bfloat16Codec(Codec):
    name = "bfloat16"

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, numbers: Vector) -> Bytes:
        return numbers.astype(BFLOAT16).view(np.uint8)

    def decode(self, data: Bytes, count: int) -> Vector:
        del count
        return data.view(BFLOAT16).astype(np.float32)


@final
class Bfloat16(Compressor):
    """Gradients are sent in bfloat16, the upper half of a float32, and summed in float32.

    Unlike with float16, no value overflows or underflows; 8 bits of precision remain. Rounding is to nearest and thus
    unbiased, so there is no error feedback. Arrays of float16 are sent uncompressed.
    """

    def wire_dtype(self, dtype: DType) -> DType:
        """See ``reject_single_array``."""
        return reject_single_array("bf16", dtype)

    def row_dtype(self, dtype: DType) -> DType:
        """Returns bfloat16 for wider floating-point dtypes."""
        return BFLOAT16 if is_floating(dtype) and dtype.itemsize > BFLOAT16.itemsize else dtype

    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """See ``Compressor``."""
        float16 = np.dtype(np.float16)
        chosen = [index for index, (_, dtype) in enumerate(layout) if is_floating(dtype) and dtype != float16]
        compressing = partial(
            VectorExchange, method=partial(SlicedSum, communicator, codec=_Bfloat16Codec()), feedback=False
        )
        return selective_exchange(communicator, layout, groups, chosen, compressing)
