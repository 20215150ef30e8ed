"""The mpirun process: runs in its own session, behind a gate; when it ends, every process of that session is ended.
In a job on one host, nobody but the job's wrappers connects to it:

::

    chorosrun        mpirun                     another user
        │ starts ──────►│ listens
        │ sees it       │ ◄───── connects ───────── │      microseconds later
        │ stops it, closes the gate, expels ──────► │
        │ continues it  │
        │               │ starts wrappers
        │ key ──────────────► wrappers connect, signed

mpirun knows its job only once it listens, so nothing can be asked of it before. If this process was not scheduled
in that moment, and somebody has sent it something, mpirun is started again.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from choros import durations
from choros.errors import LaunchError
from choros.launch.plan.command import Command
from choros.launch.processes import process_tree
from choros.launch.processes.directories import write_key

#: How often mpirun is started again because somebody has connected to it.
_TRIES = 20


class MpirunProcess:
    """Starts ``command`` under a parent-death guard: it is killed when this process dies."""

    def __init__(self, command: Command, *, stdin: bool) -> None:
        self._command = command
        self._start(stdin=stdin)
        for _ in range(_TRIES if command.gate else 0):
            self._watch_start()
            if not self._intruders:
                break
            self.send(signal.SIGKILL)
            self.finish()
            self._start(stdin=stdin)
        self.stdin = self._popen.stdin.fileno() if self._popen.stdin is not None else -1
        self.stdout = self._popen.stdout.fileno() if self._popen.stdout is not None else -1
        self.stderr = self._popen.stderr.fileno() if self._popen.stderr is not None else -1

    def _start(self, *, stdin: bool) -> None:
        # The name of the job for mpirun and its clients, which nobody guesses; other hosts show it in a command line.
        namespace = {"PMIX_SERVER_NSPACE": f"choros-{os.urandom(16).hex()}"} if self._command.gate else {}
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", process_tree.__file__, str(os.getpid()), *self._command.argv],
            env={**self._command.environ, **namespace},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        from choros.transport.gate import Gate  # imports sockets, which --help does not need

        self._gate = Gate(self._popen.pid)
        #: Users who have sent it something in more than a moment.
        self._intruders: set[int] = set()
        self._known: set[int] = set()
        self._looked = time.monotonic()

    def _watch_start(self) -> None:
        """Closes the gate as soon as mpirun listens, and returns when it starts processes, or takes long for it."""
        pid, end = self._popen.pid, time.monotonic() + durations.GATE_SPIN
        while not self.has_ended() and time.monotonic() <= end:
            with suppress(OSError):  # the kernel may not list them
                if Path(f"/proc/{pid}/task/{pid}/children").read_bytes():
                    break
            self.look()
        self.look()

    def look(self) -> None:
        """Closes the gate if mpirun has opened a socket."""
        from choros.transport.peers import sockets_of

        pid = self._popen.pid
        sockets = set(sockets_of(pid))
        if not sockets <= self._known:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                late = time.monotonic() - self._looked > durations.GATE_LOOK
                self._gate.close()
                users = self._gate.expel()
                os.kill(pid, signal.SIGCONT)
                self._intruders |= users if late else set()
            self._known |= sockets
        self._looked = time.monotonic()

    def close_gate(self) -> bool:
        """Closes the gate for good and gives wrappers its key; ``False``: no gate is allowed. Fails at an intruder."""
        self.look()
        if self._intruders:
            users = ", ".join(map(str, sorted(self._intruders)))
            raise LaunchError(
                f"a process of another user (uid {users}) connects to mpirun whenever it starts. Ask that user, or an "
                "administrator, to end it."
            )
        closed = self._gate.close()
        write_key(Path(self._command.gate), self._gate.key if closed else b"")
        return closed

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
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(durations.MPIRUN_END)
                break
            self.send(number)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(durations.MPIRUN_END)
        self._end_session()
        return self._popen.returncode or 0

    def _end_session(self) -> None:
        end = time.monotonic() + durations.MPIRUN_CHILDREN
        while (left := self._session()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _session(self) -> list[int]:
        try:
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        except FileNotFoundError:
            import psutil  # takes 10 ms; needed only on systems without /proc

            pids = list(psutil.pids())
        found = []
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self._popen.pid:
                    found.append(pid)
        return found
