"""The parent-death guard: kills a process when its parent dies; and other settings of the kernel for a process.

On Linux, the kernel does it: ``prctl(PR_SET_PDEATHSIG)``. On other systems this file, run as a script, stays between
the two processes and polls the parent twice a second.

As a script: ``python parent_death_guard.py PARENT_PID COMMAND …`` runs COMMAND under the guard.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["allow_tracing", "become_subreaper", "die_with_parent", "signal_at_parent_death"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_FORWARDED = (
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGUSR1",
    "SIGUSR2",
    "SIGALRM",
    "SIGABRT",
    "SIGURG",
    "SIGPROF",
    "SIGVTALRM",
)


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # not at the top: imports dominate the time of a short job

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def die_with_parent(parent: int) -> bool:
    """Has the kernel kill this process when ``parent`` dies; returns ``False`` if the kernel cannot."""
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        return False
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def become_subreaper() -> bool:
    """Makes this process the parent of orphaned descendants; returns ``False`` if the kernel cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def allow_tracing(tracer: int) -> bool:
    """Allows ``tracer`` and its children to read this process's memory, even if the kernel allows only ancestors to.

    Returns ``False`` if there is no such restriction (``kernel.yama.ptrace_scope``).
    """
    return _prctl(_PR_SET_PTRACER, tracer)


def signal_at_parent_death(number: int) -> bool:
    """Has the kernel send this process ``number`` when its parent dies; returns ``False`` if the kernel cannot.

    The signal may arrive earlier: the kernel sends it when the thread that started this process ends.
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
    """Runs the command in ``sys.argv``, guarded against the death of its parent."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if not die_with_parent(parent):
        sys.exit(_watch(parent, command))
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
