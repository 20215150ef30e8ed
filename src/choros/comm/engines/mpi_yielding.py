"""How Open MPI waits in calls that block: by polling without a pause, or yielding the core between two polls.

Yielding costs a small allreduce some 10 µs where the core has nothing else to do, and saves milliseconds where it has.
So each rank yields while it has evidence that other processes use its core: a yield in ``wait_until`` that took long.
That is a local choice: what ranks send does not depend on it.

::

    agree: no long yield ──► agree: a long yield ──► yield on ──► 100 agreements without a long yield ──► yield off
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import final

__all__ = ["IdleYield", "idle_yield", "open_mpi_switch"]

#: Ranks that arrive last do not wait, and so have no evidence: it is kept for this number of agreements.
_AGREEMENTS = 100


@cache
def idle_yield() -> IdleYield:
    """The switch of this process; MPI must have been initialised."""
    return IdleYield(open_mpi_switch())


@final
class IdleYield:
    """Switches the yielding of this process.

    Example:
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
    """The function of this process' Open MPI, once MPI is initialised.

    Returns:
        ``None`` for another MPI, on a system without ``/proc``, and if yielding is on already: the user, or chorosrun
        for more ranks than cores, has chosen it (``OMPI_MCA_mpi_yield_when_idle``).
    """
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
