"""The top-k compression: only the largest elements are sent."""

import math
from functools import partial
from typing import final

import numpy as np

from choros.comm import Communicator
from choros.comm.fusion import Layout
from choros.errors import ConfigError
from choros.parallel.compression.compressor import DType, SelectiveCompressor, is_floating
from choros.parallel.compression.vector import Vector, VectorExchange, VectorSum
from choros.parallel.reduce.exchange import Exchange, Groups

#: Arrays of fewer elements, above all biases, are sent uncompressed: they are few bytes and matter much.
SMALL = 1024


@final
class _TopKSum(VectorSum):
    """Each rank gathers the indices and values of all ranks and sums them in rank order."""

    def __init__(self, communicator: Communicator, count: int, ratio: float) -> None:
        self._communicator = communicator
        self._chosen = math.ceil(ratio * count)
        self._index = np.dtype(np.int32 if count <= 2**31 else np.int64)
        self.description = f"top {self._chosen} of float32[{count}]"

    def sum(self, vector: Vector, residual: Vector | None) -> Vector:
        """See ``VectorSum``; values that are not finite count as the largest, hence are sent."""
        least = len(vector) - self._chosen
        largest = np.argpartition(np.abs(vector), least)[least:].astype(self._index)
        largest.sort()
        message = np.concatenate([largest.view(np.uint8), vector[largest].view(np.uint8)])
        gathered = self._communicator.gather_bytes(message, [len(message)] * self._communicator.size)

        total = np.zeros_like(vector)
        for part in np.split(gathered, self._communicator.size):
            indices, values = np.split(part, [largest.nbytes])
            total[indices.view(self._index)] += values.view(np.float32)
        if residual is not None:
            residual[...] = vector
            residual[largest] = 0
        return total


@final
class TopK(SelectiveCompressor):
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

    def compressing(self, communicator: Communicator, layout: Layout, groups: Groups) -> Exchange:
        """See ``SelectiveCompressor``."""
        return VectorExchange(layout, groups, partial(_TopKSum, communicator, ratio=self.ratio), feedback=True)
