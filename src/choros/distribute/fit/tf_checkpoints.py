"""``tf.train.Checkpoint`` and its manager in a scope: process 0 writes, all processes return the path.

The files are those of one device: a checkpoint saved under a strategy can be restored without one, and vice versa.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from choros.comm import global_process_set
from choros.distribute.writing import write_once

__all__ = ["patch_checkpoint", "patch_manager"]


def patch_checkpoint(checkpoint: Any) -> None:
    """Patches ``save`` and ``write`` of a ``tf.train.Checkpoint`` to write on process 0 only."""
    for name in ("save", "write"):
        object.__setattr__(checkpoint, name, _write_once(getattr(checkpoint, name), _counting(checkpoint, name)))


def patch_manager(manager: Any) -> None:
    """Patches ``save`` of a ``tf.train.CheckpointManager`` to write on process 0 only."""

    def record(path: str | None) -> None:
        manager._checkpoint.save_counter.assign_add(1)
        manager._latest_checkpoint = path or manager._latest_checkpoint

    object.__setattr__(manager, "save", _write_once(manager.save, record))


def _counting(checkpoint: Any, name: str) -> Callable[[Any], None]:
    """Returns the function with which the other processes record a checkpoint that process 0 has written."""

    def count(path: Any) -> None:
        del path
        if name == "save":
            checkpoint.save_counter.assign_add(1)

    return count


def _write_once(own: Callable[..., Any], on_other_ranks: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        path = write_once(lambda: own(*args, **kwargs))
        if global_process_set.communicator.rank != 0:
            on_other_ranks(path)
        return path

    return method
