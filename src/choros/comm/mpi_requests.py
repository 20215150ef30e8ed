"""Waiting for MPI's nonblocking collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from choros.comm.waiting import LongWait, wait_until

__all__ = ["wait_for"]

#: MPI may still write into the buffers of a collective that has failed: they must never be freed.
_failed: list[Any] = []


def wait_for(request: MPI.Request, *buffers: Any, describe: Callable[[], LongWait] | None = None) -> bool:
    """Waits politely for a nonblocking collective.

    Args:
        request: the collective.
        buffers: its buffers, which are kept if it fails.
        describe: as for ``wait_until``.

    Returns:
        As ``wait_until``.
    """
    try:
        return wait_until(request.Test, describe=describe)
    except MPI.Exception:
        _failed.append((request, buffers))
        raise
