"""Closes sockets of libraries, which listen at all addresses of the host, to those that have no business there.

Open MPI and its mpirun listen for other hosts even if all ranks run on one, and no parameter changes that::

    rank          MPI_Init, between two looks at its own sockets: the new ones are MPI's. Bound to the loopback
                  interface (SO_BINDTODEVICE), they accept only what arrives there, such as spawned processes.
    chorosrun     mpirun's sockets for its daemons, duplicated from its child (pidfd_getfd). A filter
                  (SO_ATTACH_FILTER) drops all packets: there are no daemons.

The owner of a socket notices nothing. Linux only, from 5.7 on, and only where containers allow it; elsewhere nothing
changes.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["INTERFACE", "drop_connections", "new_sockets_on_loopback"]

#: The name of the loopback interface.
INTERFACE = "lo"
_LISTENS = "0A"
_EVERYWHERE = {"0" * 8, "0" * 32}
#: Linux' numbers of a system call, an option of sockets, and the instruction of a filter that returns a constant.
_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_RETURN = 0x06


def drop_connections(pid: int) -> None:
    """Has the kernel drop what arrives at the sockets with which a child process listens at all addresses."""
    for descriptor in _listening(pid):
        with suppress(OSError), _duplicate(pid, descriptor) as listening:
            _drop(listening)


@contextmanager
def new_sockets_on_loopback() -> Iterator[None]:
    """A context after which the sockets with which this process has begun to listen in it are bound to loopback."""
    before = _listening(os.getpid())
    yield
    if not hasattr(socket, "SO_BINDTODEVICE"):
        return
    for descriptor in _listening(os.getpid()) - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, INTERFACE.encode())


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


def _drop(listening: socket.socket) -> None:
    import ctypes

    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))
