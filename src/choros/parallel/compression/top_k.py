"""The top-k compression: only the largest elements are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import final

import numpy as np

from choros.comm import Communicator
from choros.errors import ConfigError
from choros.parallel.compression.compressor import Compressor, DType, is_floating, reject_single_array
from choros.parallel.compression.selection import selective_exchange
from choros.parallel.compression.vector import Vector, VectorExchange, VectorSum
from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["SMALL", "TopK"]

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
class TopK(Compressor):
    """Of each group of gradients, only the largest elements are sent; error feedback sends the others later.

    Every rank selects its own elements and sends an index of 4 bytes and a value of 4 bytes for each, to every
    other rank: the bytes that a rank *receives* grow with the number of ranks, so it suits few ranks, or
    small ratios. Aji and Heafield 2017 (https://arxiv.org/abs/1704.05021); Deep Gradient Compression, Lin et
    al. 2018 (https://arxiv.org/abs/1712.01887), whose momentum correction and warm-up are not implemented.

    Args:
        ratio: the share of the elements to send, more than 0 and at most 1.

    Raises:
        ConfigError: ``ratio`` is out of range.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ConfigError(f"top_k(ratio={ratio}): expected a ratio of more than 0 and at most 1, such as 0.01.")
        self.ratio = ratio

    def wire_dtype(self, dtype: DType) -> DType:
        """See ``reject_single_array``."""
        return reject_single_array("top_k", dtype)

    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """See ``Compressor``."""
        chosen = [i for i, (shape, dtype) in enumerate(layout) if is_floating(dtype) and math.prod(shape) >= SMALL]
        compressing = partial(VectorExchange, method=partial(_TopKSum, communicator, ratio=self.ratio), feedback=True)
        return selective_exchange(communicator, layout, groups, chosen, compressing)
