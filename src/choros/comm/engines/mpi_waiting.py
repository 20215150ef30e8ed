"""How ranks wait in MPI: politely for nonblocking collectives; in calls that block Open MPI polls, or yields the core
between two polls, a local choice. Yielding costs a small allreduce 10 µs, and saves milliseconds where others use the
core, as long yields show::

    agree: no long yield ──► agree: a long yield ──► yield on ──► 100 agreements without a long yield ──► yield off
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, final

from mpi4py import MPI

from choros.comm.waiting import LongWait, wait_until

#: MPI may still write into the buffers of a collective that has failed: they must never be freed.
_failed: list[
    Any
] = []  #: Ranks that arrive last do not wait, and so have no evidence: it is kept for this number of agreements.
_AGREEMENTS = 100


def wait_for(request: MPI.Request, *buffers: Any, describe: Callable[[], LongWait] | None = None) -> bool:
    """Waits politely for a nonblocking collective, as ``wait_until`` does; keeps its ``buffers`` if it fails."""
    try:
        return wait_until(request.Test, describe=describe)
    except MPI.Exception:
        _failed.append((request, buffers))
        raise


@cache
def idle_yield() -> IdleYield:
    """The switch of this process; MPI must have been initialised."""
    return IdleYield(open_mpi_switch())


@final
class IdleYield:
    """Switches the yielding of this process.

    >>> calls = []
    >>> idle = IdleYield(calls.append)
    >>> idle.note(core_is_shared=True)
    >>> for _ in range(100):
    ...     idle.note(core_is_shared=False)
    >>> calls
    [True, False]
    """

    def __init__(self, switch: Callable[[bool], object] | None) -> None:
        """``switch`` turns yielding on and off; ``None``: it cannot be switched."""
        self._switch = switch
        self._agreements = 0

    @property
    def switchable(self) -> bool:
        """Whether it changes anything."""
        return self._switch is not None

    def note(self, *, core_is_shared: bool) -> None:
        """Notes after an agreement whether another process has used this rank's core meanwhile."""
        if core_is_shared:
            if not self._agreements and self._switch:
                self._switch(True)
            self._agreements = _AGREEMENTS
        elif self._agreements:
            self._agreements -= 1
            if not self._agreements and self._switch:
                self._switch(False)


def open_mpi_switch() -> Callable[[bool], object] | None:
    """The switch of Open MPI, if MPI is initialised; ``None`` for others, without ``/proc``, and if already chosen."""
    maps = Path("/proc/self/maps")
    found = re.search(r"/.*/libopen-pal\.so\S*", maps.read_text()) if maps.exists() else None
    if found is None:
        return None
    library = ctypes.CDLL(found[0])
    try:
        switch = library.opal_progress_set_yield_when_idle
        if ctypes.c_bool.in_dll(library, "opal_progress_yield_when_idle"):
            return None
    except (AttributeError, ValueError):  # a version without them
        return None
    switch.argtypes, switch.restype = [ctypes.c_bool], ctypes.c_bool
    return switch
