"""Which part of ``n`` things is a rank's."""

from __future__ import annotations

from choros.errors import ConfigError

__all__ = ["shard_range"]


def shard_range(n: int, rank: int, size: int) -> tuple[int, int]:
    """The index range of ``n`` things that belongs to ``rank``; the first ``n % size`` ranks get one more.

    The ranges of all ranks are disjoint, in order, and together cover ``0 … n - 1``.

    Args:
        n: how many things there are, 0 or more.
        rank: whose range, ``0 … size - 1``.
        size: how many ranks share them.

    Returns:
        ``(start, end)``, ``end`` not included; empty if there are fewer things than ranks and none is left.

    Raises:
        ConfigError: ``n`` is negative or ``rank`` is not below ``size``.

    Example:
        >>> [shard_range(10, rank, 4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if n < 0 or not 0 <= rank < size:
        raise ConfigError(f"shard_range(n={n}, rank={rank}, size={size}): expected n >= 0 and 0 <= rank < size.")
    share, remainder = divmod(n, size)
    start = rank * share + min(rank, remainder)
    return start, start + share + (rank < remainder)
