"""Allocation of arrays that frameworks use without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "aligned_empty"]

#: TensorFlow and XLA use memory in place if it begins at a multiple of this number of bytes, and copy it otherwise.
ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[Any]:
    """An uninitialised array whose memory begins at a multiple of ``ALIGNMENT`` bytes.

    Example:
        >>> array = aligned_empty((3, 5), np.dtype("float32"))
        >>> array.shape, array.ctypes.data % ALIGNMENT
        ((3, 5), 0)
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
