"""Horovod's questions about this process's position."""

from __future__ import annotations

from choros.comm.context import topology

__all__ = ["cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size"]


def rank() -> int:
    """This process's number, ``0 … size() - 1``. ``NotInitializedError`` before ``init()``."""
    return topology("rank()").rank


def size() -> int:
    """How many processes train together. ``NotInitializedError`` before ``init()``."""
    return topology("size()").size


def local_rank() -> int:
    """This process's number among those on its host. ``NotInitializedError`` before ``init()``."""
    return topology("local_rank()").local_rank


def local_size() -> int:
    """How many processes run on this host. ``NotInitializedError`` before ``init()``."""
    return topology("local_size()").local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this ``local_rank()``."""
    return topology("cross_rank()").cross_rank


def cross_size() -> int:
    """How many hosts have a process of this ``local_rank()``."""
    return topology("cross_size()").cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return topology("is_homogeneous()").is_homogeneous
