"""Whose processes are at the other end of this host's connections, as the kernel knows: for libraries, such as Gloo,
that connect ranks without asking who they are. Linux only: elsewhere nothing is checked.
"""

import ipaddress
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from choros.errors import EngineError

#: In place of a user: the other end is on another host, or has ended.
ELSEWHERE = -1
_ESTABLISHED, _LISTENS = "01", "0A"

#: An address and a port.
End = tuple[str, int]


@contextmanager
def connections_of_this_user() -> Iterator[None]:
    """A context that ends with an ``EngineError`` if a new connection within this host is to another user."""
    before = sockets_of()
    yield
    new = sockets_of().keys() - before.keys()
    for inode, _, user in _with_users():
        if inode in new and user not in (ELSEWHERE, os.geteuid()):
            raise EngineError(
                f"a process of another user (uid {user}) has connected to this one in place of a rank. Start "
                "the job again; if it happens again, that user interferes."
            )


def users_connected_to(ports: set[int]) -> dict[int, int]:
    """Returns the users at the other ends of connections to these ports, by socket number; 0: not accepted yet."""
    return {inode: user for inode, port, user in _with_users() if port in ports}


def ports_of(pid: int) -> set[int]:
    """Returns the ports at which a process of this user listens."""
    own = sockets_of(pid)
    return {_end(row[1])[1] for row in _rows() if row[3] == _LISTENS and int(row[9]) in own}


def remote_addresses() -> dict[int, str]:
    """Returns the address at the other end of each established TCP connection on this host, by the socket's inode."""
    return {inode: address for _, (address, _), _, inode in _connections()}


def _connections() -> list[tuple[End, End, int, int]]:
    """Each end on this host of established TCP connections: it, the other one, its user and its socket's inode."""
    return [(_end(row[1]), _end(row[2]), int(row[7]), int(row[9])) for row in _rows() if row[3] == _ESTABLISHED]


def sockets_of(pid: int | None = None) -> dict[int, int]:
    """Returns the descriptors of a process's sockets, by the sockets' numbers; by default of this process."""
    directory = f"/proc/{pid or 'self'}/fd"
    found = {}
    with suppress(OSError):
        for name in os.listdir(directory):
            with suppress(OSError):
                target = os.readlink(f"{directory}/{name}")
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found


def _with_users() -> Iterator[tuple[int, int, int]]:
    """Of each end of a connection its socket's number, its port, and the user of the other end."""
    ends = _connections()
    users = {(local, remote): user for local, remote, user, _ in ends}
    for local, remote, _, inode in ends:
        yield inode, local[1], users.get((remote, local), ELSEWHERE)


def _rows() -> Iterator[list[str]]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            yield from map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:])


def _end(text: str) -> End:
    """The address and port in a row of the kernel's table.

    >>> _end("0100007F:1F90"), _end("0000000000000000FFFF00000100007F:1F90")
    (('127.0.0.1', 8080), ('127.0.0.1', 8080))
    """
    address, _, port = text.partition(":")
    return _address(address), int(port, 16)


@cache
def _address(text: str) -> str:
    words = bytes.fromhex(text)
    packed = b"".join(
        words[start : start + 4][:: -1 if sys.byteorder == "little" else 1] for start in range(0, len(words), 4)
    )
    return plain_address(packed)


def plain_address(address: str | bytes) -> str:
    """Returns the IPv4 address of a connection that an IPv6 socket has accepted; other addresses unchanged."""
    ip = ipaddress.ip_address(address)
    return str(getattr(ip, "ipv4_mapped", None) or ip)
