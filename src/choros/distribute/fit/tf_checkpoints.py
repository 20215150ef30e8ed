"""``tf.train.Checkpoint`` and its manager in a scope: process 0 writes, all get the path.

They save variables as those of one device: what was saved under a strategy is restored without one, and the other way
round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from choros.comm import global_process_set
from choros.distribute.writing import write_once

__all__ = ["lead_checkpoint", "lead_manager"]


def lead_checkpoint(checkpoint: Any) -> None:
    """Has ``save`` and ``write`` of a ``tf.train.Checkpoint`` write on process 0 alone."""
    for name in ("save", "write"):
        object.__setattr__(checkpoint, name, _once(getattr(checkpoint, name), _counting(checkpoint, name)))


def lead_manager(manager: Any) -> None:
    """Has ``save`` of a ``tf.train.CheckpointManager`` write on process 0 alone."""

    def note(path: str | None) -> None:
        manager._checkpoint.save_counter.assign_add(1)
        manager._latest_checkpoint = path or manager._latest_checkpoint

    object.__setattr__(manager, "save", _once(manager.save, note))


def _counting(checkpoint: Any, name: str) -> Callable[[Any], None]:
    """What the other processes do for a checkpoint that process 0 has written."""

    def count(path: Any) -> None:
        del path
        if name == "save":
            checkpoint.save_counter.assign_add(1)

    return count


def _once(own: Callable[..., Any], elsewhere: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        path = write_once(lambda: own(*args, **kwargs))
        if global_process_set.communicator.rank != 0:
            elsewhere(path)
        return path

    return method
