"""A process tree: signals and ends a process together with its descendants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["end_children", "group_exists", "signal_group"]


def signal_group(group: int, number: int) -> None:
    """Sends ``number`` to every process of ``group`` that still runs."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def group_exists(group: int) -> bool:
    """Returns whether ``group`` still has a process; a zombie counts."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_children(reap: Callable[[], None]) -> None:
    """Kills this process's children, and their children, which it inherits when their parents die.

    Args:
        reap: waits for the children that have ended.
    """
    for _ in range(100):  # the kernel needs a moment to reparent orphans
        children = _children()
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        reap()
        if not children:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    """Returns this process's children; an empty list if the kernel does not list them."""
    me = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    except OSError:
        return []
