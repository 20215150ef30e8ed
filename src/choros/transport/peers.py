"""Whose processes are at the other end of this process's connections within the host, as the kernel knows.

For connections that a library makes, such as Gloo, which connects ranks without asking who they are. Linux only:
elsewhere nothing is checked.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from choros.errors import EngineError

__all__ = ["connections_of_this_user", "remote_addresses"]

_ESTABLISHED = "01"


@dataclass(frozen=True)
class _Connection:
    """A row of the kernel's table: one end of a connection, and the user who owns it."""

    local: str
    remote: str
    user: int
    inode: str


@contextmanager
def connections_of_this_user() -> Iterator[None]:
    """A context in which this process is connected, within this host, only to processes of this user.

    Raises:
        EngineError: at its end, if a process of another user is at the other end of a new connection.
    """
    before = _own_sockets()
    yield
    new = _own_sockets() - before
    table = {(each.local, each.remote): each for each in _established()}
    for connection in [each for each in table.values() if each.inode in new]:
        other = table.get((connection.remote, connection.local))
        if other is not None and other.user != os.geteuid():
            raise EngineError(
                f"a process of another user (uid {other.user}) has connected to this one in place of a rank. Start "
                "the job again; if it happens again, that user interferes."
            )


def remote_addresses() -> dict[int, str]:
    """Returns the address at the other end of each established TCP connection on this host, by the socket's inode."""
    return {int(each.inode[len("socket:[") : -1]): _address(each.remote) for each in _established()}


def _address(text: str) -> str:
    """The IP address in a row of the kernel's table.

    Example:
        >>> _address("0100007F:1F90"), _address("0000000000000000FFFF00000100007F:1F90")
        ('127.0.0.1', '127.0.0.1')
    """
    words = bytes.fromhex(text.partition(":")[0])
    packed = b"".join(
        words[start : start + 4][:: -1 if sys.byteorder == "little" else 1] for start in range(0, len(words), 4)
    )
    ip = ipaddress.ip_address(packed)
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def _own_sockets() -> set[str]:
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def _established() -> Iterator[_Connection]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    yield _Connection(fields[1], fields[2], int(fields[7]), f"socket:[{fields[9]}]")
