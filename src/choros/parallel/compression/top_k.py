"""Only the largest items travel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import final

import numpy as np

from choros.comm import Communicator
from choros.errors import ConfigError
from choros.parallel.compression.compressor import Compressor, DType, is_floating, refuse_lone
from choros.parallel.compression.selection import SelectiveExchange
from choros.parallel.compression.vector import Vector, VectorExchange, VectorSum
from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["SMALL", "TopK"]

#: Arrays of fewer items, biases above all, travel as they are: they are few bytes and matter much.
SMALL = 1024


@final
class _TopKSum(VectorSum):
    """Each rank gathers everybody's indices and values and adds them up, in the ranks' order."""

    def __init__(self, communicator: Communicator, count: int, ratio: float) -> None:
        self._communicator = communicator
        self._chosen = math.ceil(ratio * count)
        self._index = np.dtype(np.int32 if count <= 2**31 else np.int64)
        self.description = f"top {self._chosen} of float32[{count}]"

    def sum(self, vector: Vector, lost: Vector | None) -> Vector:
        """See ``VectorSum``; what is not finite counts as largest, hence arrives."""
        least = len(vector) - self._chosen
        largest = np.argpartition(np.abs(vector), least)[least:].astype(self._index)
        largest.sort()
        message = np.concatenate([largest.view(np.uint8), vector[largest].view(np.uint8)])
        gathered = self._communicator.gather_bytes(message, [len(message)] * self._communicator.size)

        total = np.zeros_like(vector)
        for part in np.split(gathered, self._communicator.size):
            indices, values = np.split(part, [largest.nbytes])
            total[indices.view(self._index)] += values.view(np.float32)
        if lost is not None:
            lost[...] = vector
            lost[largest] = 0
        return total


@final
class TopK(Compressor):
    """Of each group of gradients, a share of the items travels: the largest ones. The others are kept for later.

    Every rank chooses for itself and sends an index of 4 bytes and a value of 4 bytes for each item, to every
    other rank: the bytes that a rank *receives* grow with the number of ranks, so it is for few of them, or
    small ratios. Aji and Heafield 2017 (https://arxiv.org/abs/1704.05021); Deep Gradient Compression, Lin et
    al. 2018 (https://arxiv.org/abs/1712.01887), whose corrections for momentum and whose warm-up are not done.

    Args:
        ratio: the share of the items, more than 0 and at most 1.

    Raises:
        ConfigError: another ratio.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ConfigError(f"top_k(ratio={ratio}): a share of the items is more than 0 and at most 1, such as 0.01.")
        self.ratio = ratio

    def wire_dtype(self, dtype: DType) -> DType:
        """See ``refuse_lone``."""
        return refuse_lone("top_k", dtype)

    def exchange(self, communicator: Communicator, layout: Layout, groups: Sequence[Sequence[int]]) -> Exchange:
        """See ``Compressor``."""
        chosen = [i for i, (shape, dtype) in enumerate(layout) if is_floating(dtype) and math.prod(shape) >= SMALL]
        compressing = partial(VectorExchange, method=partial(_TopKSum, communicator, ratio=self.ratio), feedback=True)
        return SelectiveExchange(communicator, layout, groups, chosen, compressing)
