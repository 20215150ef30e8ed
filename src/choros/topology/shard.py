"""Sharding: the index range of each rank."""

from __future__ import annotations

from choros.errors import ConfigError

__all__ = ["shard_range"]


def shard_range(n: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the index range of ``rank`` among ``n`` elements; the first ``n % size`` ranks get one more.

    The ranges of all ranks are disjoint, in order, and together cover ``0 … n - 1``.

    Args:
        n: the number of elements, 0 or more.
        rank: the rank, ``0 … size - 1``.
        size: the number of ranks.

    Returns:
        ``(start, end)``, ``end`` excluded; empty for the last ranks if there are fewer elements than ranks.

    Raises:
        ConfigError: ``n`` is negative, or ``rank`` is not in ``0 … size - 1``.

    Example:
        >>> [shard_range(10, rank, 4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if n < 0 or not 0 <= rank < size:
        raise ConfigError(f"shard_range(n={n}, rank={rank}, size={size}): expected n >= 0 and 0 <= rank < size.")
    share, remainder = divmod(n, size)
    start = rank * share + min(rank, remainder)
    return start, start + share + (rank < remainder)
