"""Restricts sockets of libraries, which listen at all addresses of the host, to the loopback interface.

Open MPI and its mpirun listen for other hosts even if all ranks run on one, and no parameter changes that. A listening
socket that is bound to an interface (``SO_BINDTODEVICE``) accepts only what arrives there; its owner notices nothing.

::

    rank          MPI_Init, between two looks at its own sockets: the new ones are MPI's
    chorosrun     mpirun's sockets, which it duplicates from its child (pidfd_getfd)

Linux only, from 5.7 on, and only where containers allow it; elsewhere nothing changes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["INTERFACE", "new_sockets_on_loopback", "restrict_to_loopback"]

#: The name of the loopback interface.
INTERFACE = "lo"
_LISTENS = "0A"
_EVERYWHERE = {"0" * 8, "0" * 32}
#: The number of the system call, the same on all processors.
_PIDFD_GETFD = 438


def restrict_to_loopback(pid: int) -> int:
    """Restricts the sockets on which a child process listens at all addresses; returns their number."""
    restricted = 0
    for descriptor in sorted(_listening(pid)):
        with suppress(OSError), _duplicate(pid, descriptor) as listening:
            _restrict(listening)
            restricted += 1
    return restricted


@contextmanager
def new_sockets_on_loopback() -> Iterator[None]:
    """A context after which the sockets that this process has begun to listen on in it are restricted."""
    before = _listening(os.getpid())
    yield
    for descriptor in _listening(os.getpid()) - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listening:
            _restrict(listening)


def _listening(pid: int) -> set[int]:
    """Returns the descriptors with which a process listens at all addresses."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[1].partition(":")[0] in _EVERYWHERE:
                    inodes.add(f"socket:[{fields[9]}]")
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                    found.add(int(name))
    return found


def _duplicate(pid: int, descriptor: int) -> socket.socket:
    """Returns another process's socket; raises an ``OSError`` if the kernel does not allow it."""
    if not sys.platform.startswith("linux"):
        raise OSError("only Linux has pidfd_getfd")
    import ctypes  # takes 5 ms, which only some processes need

    handle = os.pidfd_open(pid)
    try:
        duplicate = ctypes.CDLL(None).syscall(_PIDFD_GETFD, handle, descriptor, 0)
    finally:
        os.close(handle)
    if duplicate < 0:
        raise OSError("pidfd_getfd is not allowed")
    return socket.socket(fileno=duplicate)


def _restrict(listening: socket.socket) -> None:
    if sys.platform.startswith("linux"):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, INTERFACE.encode())
