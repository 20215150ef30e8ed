"""The order of an epoch, drawn from a seed: the same on all processes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["order_of", "shuffled_batch"]


@lru_cache(maxsize=4)
def order_of(number: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of ``number`` examples in an epoch.

    Example:
        >>> sorted(order_of(4, seed=1, epoch=0).tolist())
        [0, 1, 2, 3]
    """
    return np.random.default_rng((seed, epoch + 1)).permutation(number)  # counted from 1, as Keras prints them


def shuffled_batch(position: int, number: int, seed: int, epoch: int) -> int:
    """Returns the batch at a position in an epoch of ``number``; the last, which may be smaller, stays the last.

    Example:
        >>> sorted(shuffled_batch(position, 4, seed=1, epoch=0) for position in range(3)), shuffled_batch(3, 4, 1, 0)
        ([0, 1, 2], 3)
    """
    return position if position == number - 1 else int(order_of(number - 1, seed, epoch)[position])
