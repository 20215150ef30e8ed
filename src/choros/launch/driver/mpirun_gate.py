"""The gate before mpirun, in a job on one host: nobody but the job's wrappers connects to it.

::

    chorosrun        mpirun                     another user
        │ starts ──────►│ listens
        │ sees it       │ ◄───── connects ───────── │      microseconds later
        │ stops it, closes the gate, expels ──────► │
        │ continues it  │
        │               │ starts wrappers
        │ key ──────────────► wrappers connect, signed

mpirun knows its job only after it has begun to listen, so nothing can be asked of it before. If this process was not
scheduled in that moment, and somebody has sent it something, mpirun is started again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from choros.launch.processes.gate_key import write_key
from choros.transport.gate import Gate, new_key
from choros.transport.peers import sockets_of

__all__ = ["MpirunGate"]

#: mpirun takes longer from its first socket to the start of its job.
_MOMENT_SECONDS = 0.001
#: How long this process waits for mpirun's sockets without doing anything else.
_SPIN_SECONDS = 0.3


@final
class MpirunGate:
    """The gate before an mpirun that was just started.

    Args:
        pid: its process.

    Attributes:
        intruders: the users whose processes have sent it something in more than a moment.
    """

    def __init__(self, pid: int) -> None:
        self.intruders: set[int] = set()
        self._pid = pid
        self._key = new_key()
        self._gate = Gate(pid, self._key)
        self._known: set[int] = set()
        self._looked = time.monotonic()

    def wait(self, has_ended: Callable[[], bool]) -> None:
        """Closes the gate as soon as mpirun listens, and returns when it starts processes, or takes long for it."""
        end = time.monotonic() + _SPIN_SECONDS
        while not (self._has_children() or has_ended() or time.monotonic() > end):
            self.look()
        self.look()

    def look(self) -> None:
        """Closes the gate if mpirun has opened a socket."""
        sockets = set(sockets_of(self._pid))
        if not sockets <= self._known:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGSTOP)
                late = time.monotonic() - self._looked > _MOMENT_SECONDS
                self._gate.close()
                users = self._gate.expel()
                os.kill(self._pid, signal.SIGCONT)
                self.intruders |= users if late else set()
            self._known |= sockets
        self._looked = time.monotonic()

    def give_key(self, session: Path) -> bool:
        """Closes the gate for good, and gives wrappers the key; returns ``False`` if the kernel allows no gate."""
        closed = self._gate.close()
        write_key(session, self._key if closed else b"")
        return closed

    def _has_children(self) -> bool:
        try:
            return bool(Path(f"/proc/{self._pid}/task/{self._pid}/children").read_bytes())
        except OSError:
            return False
