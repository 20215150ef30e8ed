"""The compressions none and fp16: gradients are sent uncompressed, or cast to float16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from choros.comm import BFLOAT16, Communicator
from choros.parallel.compression.compressor import Compressor, DType, is_floating
from choros.parallel.reduce.exchange import Exchange, Layout
from choros.parallel.reduce.fused import FusedExchange

__all__ = ["Float16", "NoCompression", "plain_dtype"]


def plain_dtype(dtype: DType) -> DType:
    """Returns the dtype in which uncompressed arrays are summed, hence sent: float32 for bfloat16, else ``dtype``."""
    return np.dtype(np.float32) if dtype == BFLOAT16 else dtype


@final
class NoCompression(Compressor):
    """Gradients are sent uncompressed."""

    def wire_dtype(self, dtype: DType) -> DType:
        """See ``plain_dtype``."""
        return plain_dtype(dtype)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Returns ``tensor`` itself."""
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Returns ``tensor`` itself."""
        del context
        return tensor

    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """See ``Compressor``."""
        return FusedExchange(communicator, layout, groups, self.wire_dtype)


@final
class Float16(Compressor):
    """Gradients are sent and summed in float16."""

    def wire_dtype(self, dtype: DType) -> DType:
        """Returns float16 for every floating-point dtype."""
        return np.dtype(np.float16) if is_floating(dtype) else dtype

    def row_dtype(self, dtype: DType) -> DType:
        """As ``wire_dtype``."""
        return self.wire_dtype(dtype)

    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """See ``Compressor``."""
        return FusedExchange(communicator, layout, groups, self.wire_dtype)
