"""A process tree: signals and ends a process together with its descendants."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


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
    """Kills this process's children, and theirs, inherited when parents die; ``reap`` waits for the ended ones."""
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    for _ in range(100):  # the kernel needs a moment to reparent orphans
        try:
            children = [int(pid) for pid in listed.read_text().split()]
        except OSError:  # the kernel does not list them
            children = []
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        reap()
        if not children:
            return
        time.sleep(0.01)
