"""The examples of a rank: global batches, each sharded over all ranks.

One process would see the batches ``0 1 2 3 | 4 5 6 7 | 8 9``; two ranks see the same ones together::

    rank 0    0 1 . .   4 5 . .   8 .
    rank 1    . . 2 3   . . 6 7   . 9
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from choros.errors import ConfigError
from choros.topology import shard_range

__all__ = ["batch_ranges", "check_batch_size", "example_indices"]


def check_batch_size(batch_size: int, size: int) -> None:
    """Raises a ``ConfigError`` if ``batch_size`` examples cannot be sharded over ``size`` ranks."""
    if batch_size < size:
        raise ConfigError(
            f"batch_size={batch_size} is the number of examples of all {size} ranks together: it must be at least "
            f"{size}, one for each."
        )


def batch_ranges(n: int, batch_size: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Returns the index ranges of ``rank``'s examples in each global batch of ``n`` examples.

    Args:
        n: the number of examples.
        batch_size: the number of examples in a global batch; the last one may have fewer.
        rank: the rank.
        size: the number of ranks over which each batch is sharded.

    Returns:
        ``(start, end)`` for each batch in which the rank has an example: all, except maybe the last.

    Example:
        >>> batch_ranges(10, 4, rank=1, size=2)
        [(2, 4), (6, 8), (9, 10)]
    """
    check_batch_size(batch_size, size)
    ranges = []
    for first in range(0, n, batch_size):
        start, end = shard_range(min(batch_size, n - first), rank, size)
        if end > start:
            ranges.append((first + start, first + end))
    return ranges


def example_indices(n: int, batch_size: int, rank: int, size: int) -> NDArray[np.int64]:
    """Returns the indices of the examples of ``batch_ranges``, in order.

    Example:
        >>> example_indices(10, 4, rank=1, size=2).tolist()
        [2, 3, 6, 7, 9]
    """
    ranges = batch_ranges(n, batch_size, rank, size)
    return np.concatenate([np.arange(start, end) for start, end in ranges] or [np.empty(0, np.int64)])
