"""Gates: the kernel closes sockets at which a library listens to all who do not have a key.

Open MPI and its mpirun listen at all of the host's addresses, whatever the parameters; mpirun believes what a client
says of its user, and a rank what another says of its number. So a gate is put before their sockets, from outside::

    another user ─── SYN ───────────────►╳│
                                          │ TCP_MD5SIG (RFC 2385): the kernel drops packets without a signature
    who has the key ─ SYN, signed ───────►│──► accept()
                                         gate

This needs no rights, only the descriptor: mpirun's is duplicated from a child of this process (``pidfd_getfd``). Who
has connected before the gate was closed is *expelled*. Linux only, from 5.7 on, and only where containers allow it.
"""

import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import final

from choros.transport.peers import End, sockets_of, users_connected_to

#: The name of the loopback interface.
INTERFACE = "lo"
#: The longest key that the kernel takes.
_KEY_BYTES = 80
#: The prefixes of length 0, which are all addresses, for each kind of socket.
_ALL_ADDRESSES = {
    socket.AF_INET: [(socket.AF_INET, "0.0.0.0")],  # noqa: S104
    socket.AF_INET6: [(socket.AF_INET6, "::"), (socket.AF_INET6, "::ffff:0.0.0.0")],
}
#: Linux' numbers of a system call, of an option of TCP, and of its flag that the address is a prefix.
_PIDFD_GETFD = 438
_TCP_MD5SIG_EXT = 32
_PREFIX = 1
#: tcpi_bytes_received in struct tcp_info.
_RECEIVED = slice(128, 136)


@final
class Gate:
    """The gate before sockets, by default all at which ``pid`` listens at a call; who has its ``key`` passes."""

    def __init__(self, pid: int, sockets: Iterable[int] | None = None) -> None:
        self.key = secrets.token_bytes(_KEY_BYTES)
        self._pid = pid
        self._chosen = None if sockets is None else frozenset(sockets)
        self._examined: set[int] = set()

    def sockets(self) -> dict[int, End]:
        """Returns where the process listens, by the sockets' numbers; none if the kernel does not show them."""
        found: dict[int, End] = {}

        def note(number: int, end: socket.socket) -> None:
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and end.family in _ALL_ADDRESSES:
                found[number] = end.getsockname()[:2]

        own = sockets_of(self._pid)
        self._with_each(own if self._chosen is None else own.keys() & self._chosen, note)
        return found

    def close(self) -> bool:
        """Closes the gate, ends connections not accepted yet; returns whether it worked for all, and any exist."""

        def close(_number: int, listening: socket.socket) -> None:
            _require(listening, self.key)
            _end_waiting(listening)

        sockets = self.sockets()
        return bool(sockets) and self._with_each(sockets, close) == len(sockets)

    def open(self) -> None:
        """Opens the gate."""
        self._with_each(self.sockets(), lambda _number, listening: _require(listening, b""))

    def expel(self) -> set[int]:
        """Ends accepted connections of other users; returns those who sent something (``ELSEWHERE``: not known)."""
        ports = {port for _, port in self.sockets().values()}
        if not ports:
            return set()
        accepted: set[int] = set()

        def note(number: int, end: socket.socket) -> None:
            if end.family in _ALL_ADDRESSES and end.getpeername() and end.getsockname()[1] in ports:
                accepted.add(number)

        self._with_each(sockets_of(self._pid).keys() - self._examined, note)
        self._examined |= accepted
        if not accepted:  # the kernel's table takes it milliseconds
            return set()
        strangers = {
            number: user
            for number, user in users_connected_to(ports).items()
            if number in accepted and user != os.geteuid()
        }
        senders: set[int] = set()

        def end(number: int, connection: socket.socket) -> None:
            connection.shutdown(socket.SHUT_RDWR)
            if _received(connection):
                senders.add(strangers[number])

        self._with_each(strangers, end)
        return senders

    def _with_each(self, sockets: Iterable[int], action: Callable[[int, socket.socket], None]) -> int:
        """Calls ``action`` with the process's sockets of these numbers; returns how many times it succeeded."""
        own, count = sockets_of(self._pid), 0
        for number in sockets:
            with suppress(OSError, KeyError), _duplicate(self._pid, own[number]) as duplicate:
                action(number, duplicate)
                count += 1
        return count


@contextmanager
def new_listeners() -> Iterator[set[int]]:
    """A context that binds sockets that begin to listen in it to loopback at its end; their numbers are yielded."""
    everything = Gate(os.getpid())
    before, new = everything.sockets().keys(), set[int]()
    yield new
    new |= everything.sockets().keys() - before
    if hasattr(socket, "SO_BINDTODEVICE"):
        option = (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, INTERFACE.encode())
        everything._with_each(new, lambda _number, listening: listening.setsockopt(*option))


def connect_signed(address: End, key: bytes, seconds: float) -> socket.socket:
    """Connects behind a gate, or without a key where there is none; an ``OSError`` if none answers for ``seconds``."""
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    try:
        if key:
            _require(connection, key)
        connection.settimeout(seconds)
        connection.connect(address)
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _require(end: socket.socket, key: bytes) -> None:
    """Has the kernel sign what this socket sends, and drop what it receives unsigned; without a key, not any more."""
    for family, address in _ALL_ADDRESSES[end.family]:
        packed = socket.inet_pton(family, address)
        # struct sockaddr_in or sockaddr_in6: family, port, for IPv6 flow information, address
        name = struct.pack("=HH", end.family, 0) + (b"" if family == socket.AF_INET else bytes(4)) + packed
        signature = struct.pack("=128sBBHi80s", name, _PREFIX, 0, len(key), 0, key)
        end.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, signature)


def _end_waiting(listening: socket.socket) -> None:
    ready = select.poll()  # of any number; select() takes those below 1024
    ready.register(listening, select.POLLIN)
    while ready.poll(0):
        try:
            connection, _ = listening.accept()
        except BlockingIOError:  # its owner was faster
            return
        connection.close()


def _received(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
    return int.from_bytes(info[_RECEIVED], sys.byteorder)


def _duplicate(pid: int, descriptor: int) -> socket.socket:
    """Returns another process's socket, or this one's; raises an ``OSError`` if the kernel does not allow it."""
    if pid == os.getpid():
        return socket.socket(fileno=os.dup(descriptor))
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
