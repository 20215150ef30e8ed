"""The mpirun process: runs in its own session, behind a gate; when it ends, every process of that session is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from choros.errors import LaunchError
from choros.launch.plan.command import Command
from choros.launch.processes import parent_death_guard

if TYPE_CHECKING:
    from choros.launch.driver.mpirun_gate import MpirunGate

__all__ = ["MpirunProcess"]

#: How long mpirun may take to end by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 3.0
#: How long its children may outlive it: wrappers that clean up, ssh clients that see the connection close.
_CHILDREN_GRACE = 2.0
#: How often mpirun is started again because somebody has connected to it.
_TRIES = 20


class MpirunProcess:
    """Starts ``command`` under a parent-death guard: it is killed when this process dies."""

    def __init__(self, command: Command, *, stdin: bool) -> None:
        self._command = command
        self._start(stdin=stdin)
        for _ in range(_TRIES if command.gate else 0):
            self._gate.wait(self.has_ended)
            if not self._gate.intruders:
                break
            self.send(signal.SIGKILL)
            self.finish()
            self._start(stdin=stdin)
        self.stdin = self._popen.stdin.fileno() if self._popen.stdin is not None else -1
        self.stdout = self._popen.stdout.fileno() if self._popen.stdout is not None else -1
        self.stderr = self._popen.stderr.fileno() if self._popen.stderr is not None else -1

    def _start(self, *, stdin: bool) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid()), *self._command.argv],
            env={**self._command.environ, **_namespace(self._command)},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        from choros.launch.driver.mpirun_gate import MpirunGate  # imports sockets, which --help does not need

        self._gate: MpirunGate = MpirunGate(self._popen.pid)

    def look_at_gate(self) -> None:
        """Closes the gate before further sockets of mpirun."""
        self._gate.look()

    def close_gate(self) -> bool:
        """Closes the gate for good, and gives wrappers its key; returns ``False`` if the kernel allows no gate.

        Raises:
            LaunchError: another user's process was connected.
        """
        self._gate.look()
        if self._gate.intruders:
            users = ", ".join(map(str, sorted(self._gate.intruders)))
            raise LaunchError(
                f"a process of another user (uid {users}) connects to mpirun whenever it starts. Ask that user, or an "
                "administrator, to end it."
            )
        return self._gate.give_key(Path(self._command.gate))

    def send(self, number: signal.Signals) -> None:
        """Sends mpirun a signal if it is still running."""
        self._popen.send_signal(number)

    def strangers(self) -> list[int]:
        """Returns the other users of this host whose processes are connected to mpirun."""
        from choros.transport.peers import ELSEWHERE, ports_of, users_connected_to  # a rare case

        users = set(users_connected_to(ports_of(self._popen.pid)).values())
        return sorted(users - {os.geteuid(), ELSEWHERE})

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


def _namespace(command: Command) -> dict[str, str]:
    """The name of the job for mpirun and its clients, which nobody guesses; other hosts show it in a command line."""
    return {"PMIX_SERVER_NSPACE": f"choros-{os.urandom(16).hex()}"} if command.gate else {}


def _pids() -> list[int]:
    """Returns all processes of this host."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except FileNotFoundError:
        import psutil  # takes 10 ms; needed only on systems without /proc

        return list(psutil.pids())
