"""A process tree: ends a process together with its descendants, and kills it when its parent dies.
On Linux the kernel does the latter, by ``prctl(PR_SET_PDEATHSIG)``; elsewhere this file, run as a script with
``PARENT_PID COMMAND …``, stays between the two processes and polls the parent twice a second.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

#: The kernel sends a signal when the parent, or its thread that started this process, ends.
DEATH_SIGNAL = 1
#: This process becomes the parent of orphaned descendants.
CHILD_SUBREAPER = 36
#: A process, and its children, may read this process's memory; fails without ``kernel.yama.ptrace_scope``.
PTRACER = 0x59616D61
_FORWARDED = ["TERM", "INT", "HUP", "USR1", "USR2", "ALRM", "ABRT", "URG", "PROF", "VTALRM"]


def set_option(option: int, value: int) -> bool:
    """Sets one of the options above for this process; returns ``False`` if the kernel cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # not at the top: imports dominate the time of a short job

    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def die_with_parent(parent: int) -> bool:
    """Has the kernel kill this process when ``parent`` dies; returns ``False`` if the kernel cannot."""
    if not set_option(DEATH_SIGNAL, signal.SIGKILL):
        return False
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def signal_group(group: int, number: int) -> None:
    """Sends ``number`` to every process of ``group`` that still runs."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def group_exists(group: int) -> bool:
    """Returns whether ``group`` still has a process; a zombie counts."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def reap_children() -> None:
    """Waits for this process's children that have ended, and for those that it has inherited."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_children(reap: Callable[[], None] = reap_children) -> None:
    """Kills this process's children, and theirs, inherited when parents die; ``reap`` waits for the ended ones."""
    for _ in range(100):  # the kernel needs a moment to reparent orphans
        try:
            with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as listed:
                children = [int(pid) for pid in listed.read().split()]
        except OSError:  # the kernel does not list them
            children = []
        for child in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        reap()
        if not children:
            return
        time.sleep(0.01)


def _watch(parent: int, command: list[str]) -> int:
    import subprocess

    with subprocess.Popen(command) as process:
        for name in _FORWARDED:
            signal.signal(signal.Signals[f"SIG{name}"], lambda number, _frame: process.send_signal(number))
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
