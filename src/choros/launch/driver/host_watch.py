"""Watches what the host discovery script of an elastic job prints, while the job runs.

::

    thread     script ── a:2,b:2 ── a:2,b:2 ── a:2,b:2,c:2 ── does c accept a login? ── yes
                                                                                        │ a byte, in a pipe
    supervisor ── waits in its loop for ranks and mpirun ───────────────────────────────▼ wanted(): Restart(6, …)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from choros.launch.plan.hosts import Host
from choros.launch.plan.restart import Restart

__all__ = ["HostWatch"]

_POLL_SECONDS = 1.0


class HostWatch:
    """Polls the hosts in a thread of its own.

    Args:
        hosts: returns the hosts on which ranks can be started; called every second. It may take its time.
        plan: returns how the job is to be started on given hosts; ``None``: it stays as it is.

    Attributes:
        found: the hosts of now; empty before the first look.
    """

    def __init__(
        self, hosts: Callable[[], tuple[Host, ...]], plan: Callable[[tuple[Host, ...]], Restart | None]
    ) -> None:
        self._hosts, self._plan = hosts, plan
        self._reader, self._writer = os.pipe()
        self.found: tuple[Host, ...] = ()
        self._ends = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._poll, name="choros: hosts", daemon=True).start()

    def fileno(self) -> int:
        """Readable when the hosts have changed."""
        return self._reader

    def wanted(self) -> Restart | None:
        """Returns how the job is to be started on the hosts of now; ``None``: it stays as it is."""
        os.read(self._reader, 1 << 10)
        with self._lock:
            return self._plan(self.found)

    def close(self) -> None:
        """Ends the thread after its present call."""
        with self._lock:
            self._ends.set()
            os.close(self._reader)
            os.close(self._writer)

    def _poll(self) -> None:
        while not self._ends.wait(_POLL_SECONDS):
            found = self._hosts()
            with self._lock:
                if self._ends.is_set():
                    return
                if found != self.found:
                    self.found = found
                    os.write(self._writer, b".")
