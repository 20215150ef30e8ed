"""mpirun as a process of ours: in a session of its own, and with everything it started gone when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from choros.launch.plan.command import Command
from choros.launch.processes import parent_death_guard as tether

__all__ = ["MpirunProcess"]

#: How long mpirun may take to end when asked, in each of the ways to ask.
_TO_END = 3.0
#: How long its children may outlive it: wrappers that tidy up, ssh clients that notice.
_CHILDREN_GRACE = 2.0


class MpirunProcess:
    """Starts ``command``, tethered to this process: it is killed when we are."""

    def __init__(self, command: Command, *, stdin: bool) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command.words],
            env=dict(command.environ),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.stdin = self._popen.stdin.fileno() if self._popen.stdin is not None else -1
        self.stdout = self._popen.stdout.fileno() if self._popen.stdout is not None else -1
        self.stderr = self._popen.stderr.fileno() if self._popen.stderr is not None else -1

    def send(self, number: signal.Signals) -> None:
        """Sends mpirun a signal, if it is still there."""
        self._popen.send_signal(number)

    def has_ended(self) -> bool:
        """Whether mpirun is gone; others may still hold its pipes open."""
        return self._popen.poll() is not None

    def finish(self) -> int:
        """Ends mpirun, if need be by force, and what is left of its session; returns its exit code."""
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.send(number)
            try:
                self._popen.wait(_TO_END)
                break
            except subprocess.TimeoutExpired:
                continue
        self._end_session()
        return self._popen.returncode or 0

    def _end_session(self) -> None:
        end = time.monotonic() + _CHILDREN_GRACE
        while (left := self._session()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def _session(self) -> list[int]:
        """The processes of mpirun's session."""
        found = []
        for pid in _pids():
            try:
                if os.getsid(pid) == self._popen.pid:
                    found.append(pid)
            except (ProcessLookupError, PermissionError):
                continue
        return found


def _pids() -> list[int]:
    """All processes of this host."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except FileNotFoundError:
        import psutil  # 10 ms, spent only where there is no /proc

        return list(psutil.pids())
