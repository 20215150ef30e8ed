"""A process and everything it started: signalled together, ended together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["end_children", "group_exists", "signal_group"]


def signal_group(group: int, number: int) -> None:
    """Sends ``number`` to every process of ``group`` that is still there."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def group_exists(group: int) -> bool:
    """Whether a process of ``group`` is still there; a dead one whose parent has not waited for it counts."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_children(reap: Callable[[], None]) -> None:
    """Kills this process' children, and theirs, which become ours when their parents die.

    Args:
        reap: waits for the children that have ended.
    """
    for _ in range(100):  # the kernel needs a moment to hand orphans over
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
    """This process' children, where the kernel lists them."""
    me = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]
    except OSError:
        return []
