"""The mpirun process: runs in its own session; when it ends, every process of that session is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from choros.launch.plan.command import Command
from choros.launch.processes import parent_death_guard

__all__ = ["MpirunProcess"]

#: How long mpirun may take to end by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 3.0
#: How long its children may outlive it: wrappers that clean up, ssh clients that see the connection close.
_CHILDREN_GRACE = 2.0


class MpirunProcess:
    """Starts ``command`` under a parent-death guard: it is killed when this process dies."""

    def __init__(self, command: Command, *, stdin: bool) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid()), *command.argv],
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
        """Sends mpirun a signal if it is still running."""
        self._popen.send_signal(number)

    def stop_listening(self) -> None:
        """Closes mpirun's sockets for daemons on other hosts to all; nothing changes where that is not allowed."""
        from choros.transport.loopback import drop_connections  # imports sockets

        drop_connections(self._popen.pid)

    def has_ended(self) -> bool:
        """Returns whether mpirun has ended; its children may still hold its pipes open."""
        return self._popen.poll() is not None

    def finish(self) -> int:
        """Ends mpirun, by SIGKILL if necessary, and its remaining session; returns mpirun's exit code."""
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.send(number)
            try:
                self._popen.wait(_END_SECONDS)
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
        """Returns the processes of mpirun's session."""
        found = []
        for pid in _pids():
            try:
                if os.getsid(pid) == self._popen.pid:
                    found.append(pid)
            except (ProcessLookupError, PermissionError):
                continue
        return found


def _pids() -> list[int]:
    """Returns all processes of this host."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except FileNotFoundError:
        import psutil  # takes 10 ms; needed only on systems without /proc

        return list(psutil.pids())
