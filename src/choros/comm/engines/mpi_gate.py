"""The gate before this rank's MPI, which listens for ranks that join later: open only while one connects.

::

    init() ─► closed ─► a new rank is started, or taken in ─► open ─► all are connected ─► closed
                                                               │
                                          connections of other users are ended within milliseconds

MPI connects two ranks when one sends to the other for the first time: so each sends to a new one before the gate is
closed (``greet``). In jobs on several hosts, and where ranks cannot use shared memory, there is no gate.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import numpy as np
from mpi4py import MPI

from choros.comm.engines.mpi_survivors import revoke
from choros.transport.gate import Gate

__all__ = ["RankGate", "greet", "meet_in_memory"]

_WATCH_SECONDS = 0.005
_TRANSPORTS = "OMPI_MCA_btl"
_GREETING = 4


def meet_in_memory(environ: Mapping[str, str]) -> bool:
    """Whether ranks of one host reach each other through shared memory, as Open MPI's transports say.

    Example:
        >>> [meet_in_memory({"OMPI_MCA_btl": transports}) for transports in ("", "^ofi,uct", "^sm", "self,tcp")]
        [True, True, False, False]
    """
    transports = environ.get(_TRANSPORTS, "")
    if not transports or transports.startswith("^"):
        return "sm" not in transports[1:].split(",")
    return "sm" in transports.split(",")


@final
class RankGate:
    """The gate before sockets of this process.

    Args:
        sockets: their numbers; without any, nothing is done.
    """

    def __init__(self, sockets: Iterable[int] = ()) -> None:
        self._gate = Gate(os.getpid(), sockets=sockets)
        self._lock = threading.Lock()
        self._open = 0
        self._closed = threading.Event()
        self._close()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which the gate is open; several threads may be in it."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._gate.open()
                self._closed.clear()
                threading.Thread(target=self._watch, name="choros: gate", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._close()

    def _close(self) -> None:
        self._closed.set()
        self._gate.close()
        self._gate.expel()

    def _watch(self) -> None:
        closed = self._closed
        while not closed.wait(_WATCH_SECONDS):
            self._gate.expel()


def greet(comm: MPI.Intracomm, *, is_new: bool) -> None:
    """Connects the last member of ``comm``, which is new, with all others; all members call it."""
    last, nothing = comm.Get_size() - 1, np.empty(0, np.int8)
    try:
        for other in range(last) if is_new else [last]:
            comm.Sendrecv(nothing, other, _GREETING, nothing, other, _GREETING)
    except MPI.Exception:
        revoke(comm)  # those who wait for this one do not wait for ever
        raise
