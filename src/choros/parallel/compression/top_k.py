"""The top-k compression: only the largest elements are sent."""

import math
from typing import final

import numpy as np

from choros.comm import Communicator, DType
from choros.errors import ConfigError
from choros.parallel.compression.compressor import Vector, VectorCompressor, is_floating

#: Arrays of fewer elements, above all biases, are sent uncompressed: they are few bytes and matter much.
SMALL = 1024


@final
class TopK(VectorCompressor):
    """Of each group of gradients, only the largest, a share ``ratio``, are sent; error feedback sends the others
    later. Each has 8 bytes, and a rank *receives* those of all ranks: it suits few ranks, or small ratios. Aji and
    Heafield 2017 (arXiv:1704.05021); Lin et al. 2018 (arXiv:1712.01887) without momentum correction and warm-up.
    """

    name = "top_k"

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ConfigError(f"top_k(ratio={ratio}): expected a ratio of more than 0 and at most 1, such as 0.01.")
        self.ratio = ratio

    def compresses(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See ``SelectiveCompressor``."""
        return is_floating(dtype) and math.prod(shape) >= SMALL

    def describe(self, count: int) -> str:
        """See ``VectorCompressor``."""
        return f"top {math.ceil(self.ratio * count)} of float32[{count}]"

    def sum(self, communicator: Communicator, vector: Vector, residual: Vector | None) -> Vector:
        """Gathers all ranks' indices and values, of which non-finite ones count as largest; sums them in rank order."""
        index_dtype = np.dtype(np.int32 if len(vector) <= 2**31 else np.int64)
        least = len(vector) - math.ceil(self.ratio * len(vector))
        largest = np.argpartition(np.abs(vector), least)[least:].astype(index_dtype)
        largest.sort()
        message = np.concatenate([largest.view(np.uint8), vector[largest].view(np.uint8)])
        gathered = communicator.gather_bytes(message, [len(message)] * communicator.size)

        total = np.zeros_like(vector)
        for part in np.split(gathered, communicator.size):
            indices, values = np.split(part, [largest.nbytes])
            total[indices.view(index_dtype)] += values.view(np.float32)
        if residual is not None:
            residual[...] = vector
            residual[largest] = 0
        return total
