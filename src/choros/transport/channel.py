"""Channels: authenticated connections between two processes of a job that send Python objects.

::

    connecting process                       listening process (Listener)
      connect ───────────────────────────────► accept
      ◄─────────── challenge ─────────────────            HMAC of random bytes with the job's key,
      ───────────── answer ──────────────────►            in both directions, before anything is unpickled
      ◄───── and in the other direction ─────►
      header: pickle of the object without its arrays, their sizes
      array 0, array 1, …: their bytes in memory order
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, final

from choros.errors import EngineError
from choros.transport.endpoint import connect_within

__all__ = ["Channel", "ChannelClosed", "connect", "prove"]

#: TCP keepalive detects a host that vanished: seconds of silence, seconds between probes, number of probes.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
#: How long the peer may take to prove that it has the job's key.
_PROOF_SECONDS = 20
_LOST = (EOFError, OSError)


class ChannelClosed(EngineError):
    """The peer of a channel has closed it or is lost."""


@final
class Channel:
    """Sends objects to one other process and receives them. One thread may send while another one receives.

    Args:
        connection: an authenticated connection.
        peer: the name of the other process in error messages.
    """

    def __init__(self, connection: Connection, peer: str) -> None:
        self.peer = peer
        self._connection = connection
        self._sending = threading.Lock()
        _tune(connection)

    def fileno(self) -> int:
        """The descriptor: readable when at least a part of a message has arrived, or when the peer is gone."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Sends a picklable object; arrays in it are sent without a copy.

        Raises:
            ChannelClosed: the peer is gone.
        """
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        header = pickle.dumps((body, [part.nbytes for part in raw]), protocol=5)
        try:
            with self._sending:
                self._connection.send_bytes(header)
                for part in raw:
                    if part.nbytes:
                        self._connection.send_bytes(part)
        except _LOST as error:
            raise self._closed() from error

    def receive(self) -> Any:
        """Waits for the next object and returns it; arrays in it are writable.

        Raises:
            ChannelClosed: the peer is gone.
        """
        try:
            body, sizes = pickle.loads(self._connection.recv_bytes())  # noqa: S301  (the peer is authenticated)
            buffers = [bytearray(size) for size in sizes]
            for buffer in buffers:
                if buffer:
                    self._connection.recv_bytes_into(buffer)
        except _LOST as error:
            raise self._closed() from error
        return pickle.loads(body, buffers=buffers)  # noqa: S301

    def close(self) -> None:
        """Closes the connection; the peer, and a thread that waits in ``receive``, get ``ChannelClosed``."""
        try:
            with _socket(self._connection) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # Already closed.

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"the connection to {self.peer} is closed: it has ended or cannot be reached any more.")


def connect(address: str, key: bytes, peer: str, seconds: float) -> Channel:
    """Waits for the process that listens at ``address`` and returns a channel to it.

    Args:
        address: ``host:port``, or ``unix:PATH``.
        key: the job's key.
        peer: the name of the process in error messages.
        seconds: how long to wait.

    Raises:
        EngineError: no process listens there in time, or the peer has another key.
    """
    try:
        end = connect_within(address, seconds)
    except OSError as error:
        raise EngineError(
            f"{peer} could not be reached at {address} within {seconds:g} s ({error}): check that it was "
            "started, that the address is valid on every host, and that no firewall blocks it. "
            "CHOROS_START_TIMEOUT sets the time limit."
        ) from error
    connection = Connection(end.detach())
    prove(connection, key, peer, listening=False)
    return Channel(connection, peer)


def prove(connection: Connection, key: bytes, peer: str, *, listening: bool) -> None:
    """Authenticates both ends: each proves to the other that it has the key.

    Raises:
        EngineError: the peer does not have the key, or did not reply in time.
    """
    steps = (deliver_challenge, answer_challenge) if listening else (answer_challenge, deliver_challenge)
    try:
        _receive_within(connection, _PROOF_SECONDS)
        for step in steps:
            step(connection, key)
        _receive_within(connection, 0)
    except (AuthenticationError, AssertionError, ValueError, *_LOST) as error:
        connection.close()
        raise EngineError(
            f"{peer} and this process could not authenticate each other "
            f"({type(error).__name__}: {error}): CHOROS_SECRET must be the same in all processes of the job."
        ) from error


def _socket(connection: Connection) -> socket.socket:
    """Returns a duplicate of the connection's socket, which the caller must close."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _receive_within(connection: Connection, seconds: int) -> None:
    """Sets the time limit of every receive; 0 means no limit."""
    with _socket(connection) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _tune(connection: Connection) -> None:
    with _socket(connection) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6):
            return
        # A message is several writes, none of which may wait until the peer has acknowledged the previous one.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # macOS lacks some of them.
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
