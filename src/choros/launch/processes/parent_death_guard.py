"""A process that does not outlive the one that started it.

Linux can do this itself: ``prctl(PR_SET_PDEATHSIG)`` has the kernel kill a process when its parent dies.
Elsewhere this file, run as a script, stays between the two and looks every half second.

As a script: ``python parent_death_guard.py PARENT_PID COMMAND …`` becomes COMMAND.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["adopt_orphans", "die_with_parent", "signal_at_parent_death"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGABRT", "SIGURG")


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # here, as imports are what a short job spends its time on

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def die_with_parent(parent: int) -> bool:
    """Has the kernel kill this process when ``parent`` dies; ``False`` where it cannot."""
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        return False
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def adopt_orphans() -> bool:
    """Makes this process the parent of descendants whose own parent ends; ``False`` where it cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parent_death(number: int) -> bool:
    """Has the kernel send this process ``number`` when its parent dies; ``False`` where it cannot.

    It may come earlier: the kernel sends it when the thread ends that has started this process.
    """
    return _prctl(_PR_SET_PDEATHSIG, number)


def _watch(parent: int, command: list[str]) -> int:
    import subprocess
    import time

    with subprocess.Popen(command) as process:
        for name in _FORWARDED:
            signal.signal(getattr(signal, name), lambda number, _frame: process.send_signal(number))
        while process.poll() is None:
            if os.getppid() != parent:
                process.kill()
            time.sleep(0.5)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main() -> None:
    """Becomes the command in ``sys.argv``, tethered."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if not die_with_parent(parent):
        sys.exit(_watch(parent, command))
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
