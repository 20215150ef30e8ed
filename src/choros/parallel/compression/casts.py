"""The compressions none and fp16: gradients are sent uncompressed, or cast to float16."""

from typing import Any, final

import numpy as np

from choros.parallel.compression.compressor import Compressor, DType, is_floating, plain_dtype


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


@final
class Float16(Compressor):
    """Gradients are sent and summed in float16."""

    def wire_dtype(self, dtype: DType) -> DType:
        """Returns float16 for every floating-point dtype."""
        return np.dtype(np.float16) if is_floating(dtype) else dtype

    def row_dtype(self, dtype: DType) -> DType:
        """As ``wire_dtype``."""
        return self.wire_dtype(dtype)
