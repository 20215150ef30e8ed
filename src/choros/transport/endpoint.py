"""Endpoints for listening and connecting: ``host:port``, or ``unix:PATH`` between processes of one user."""

from __future__ import annotations

import socket
import time

from choros.topology import split_address

__all__ = ["connect_within", "listen_at"]

_UNIX = "unix:"
_BACKLOG = 128
_POLL_SECONDS = 0.02


def listen_at(address: str) -> socket.socket:
    """Returns a socket that listens only at ``address``.

    Raises:
        OSError: listening there is not possible.
    """
    if address.startswith(_UNIX):
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address.removeprefix(_UNIX))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening
    host, port = split_address(address)
    family, *_, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(resolved[:2], family=family, backlog=_BACKLOG)


def connect_within(address: str, seconds: float) -> socket.socket:
    """Connects to ``address``; retries until a process listens there.

    Raises:
        OSError: the error of the last attempt, after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            connected = _connect(address, max(_POLL_SECONDS, deadline - time.monotonic()))
        except OSError:
            if time.monotonic() + _POLL_SECONDS > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            connected.settimeout(None)
            return connected


def _connect(address: str, seconds: float) -> socket.socket:
    if not address.startswith(_UNIX):
        connected = socket.create_connection(split_address(address), timeout=seconds)
        # The kernel may choose a free port of this host as the source: the socket is then connected to itself.
        if connected.getsockname() == connected.getpeername():
            connected.close()
            raise ConnectionRefusedError("no process listens there")
        return connected
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(seconds)
        connected.connect(address.removeprefix(_UNIX))
    except OSError:
        connected.close()
        raise
    return connected
