"""A connection between two processes of a job that carries Python objects.

::

    connecting process                       listening process (Listener)
      connect ───────────────────────────────► accept
      ◄─────────── challenge ─────────────────            HMAC of random bytes with the job's key,
      ───────────── answer ──────────────────►            both ways, before anything is unpickled
      ◄────────── and the other way ─────────►
      header: pickle of the object without its arrays, their sizes
      array 0, array 1, …: their bytes as they lie in memory
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

#: After so long without a word, a host that is gone without saying so is asked, so often, so many times.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
#: How long the other end may take to prove that it has the job's key.
_PROOF_SECONDS = 20
_LOST = (EOFError, OSError)


class ChannelClosed(EngineError):
    """The other end of a channel is gone."""


@final
class Channel:
    """Carries objects to one other process and back. One thread sends and one receives at a time.

    Args:
        connection: authenticated.
        peer: what the other end is called in errors.
    """

    def __init__(self, connection: Connection, peer: str) -> None:
        self.peer = peer
        self._connection = connection
        self._sending = threading.Lock()
        _tune(connection)

    def fileno(self) -> int:
        """Readable when a message has come, or begins to, or when the other end is gone."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Sends an object that pickles; arrays in it are sent without a copy.

        Raises:
            ChannelClosed: the other end is gone.
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
        """The next object; arrays in it are this process's own, and may be written to.

        Raises:
            ChannelClosed: the other end is gone.
        """
        try:
            body, sizes = pickle.loads(self._connection.recv_bytes())  # noqa: S301  (the other end has proved its key)
            buffers = [bytearray(size) for size in sizes]
            for buffer in buffers:
                if buffer:
                    self._connection.recv_bytes_into(buffer)
        except _LOST as error:
            raise self._closed() from error
        return pickle.loads(body, buffers=buffers)  # noqa: S301

    def close(self) -> None:
        """Ends the connection; the other end, and a thread that waits here, get ``ChannelClosed``."""
        try:
            with _socket(self._connection) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It was closed already.

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"the connection to {self.peer} is closed: it has ended, or cannot be reached any more.")


def connect(address: str, key: bytes, peer: str, seconds: float) -> Channel:
    """A channel to the process that listens at ``address``, for whose start it waits.

    Args:
        address: ``host:port``, or ``unix:PATH``.
        key: the job's.
        peer: what the process is called in errors.
        seconds: how long to wait.

    Raises:
        EngineError: no process listens there in time, or the other end has another key.
    """
    try:
        end = connect_within(address, seconds)
    except OSError as error:
        raise EngineError(
            f"{peer} could not be reached at {address} within {seconds:g} s ({error}): check that it was "
            "started, that the address is right on every host, and that no firewall is between. "
            "CHOROS_START_TIMEOUT sets how long to wait."
        ) from error
    connection = Connection(end.detach())
    prove(connection, key, peer, listening=False)
    return Channel(connection, peer)


def prove(connection: Connection, key: bytes, peer: str, *, listening: bool) -> None:
    """Shows the other end that this one has the key, and lets it do the same.

    Raises:
        EngineError: it has not.
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
            f"{peer} and this process could not prove to each other that they belong to one job "
            f"({type(error).__name__}: {error}): CHOROS_SECRET must be the same in all of its processes."
        ) from error


def _socket(connection: Connection) -> socket.socket:
    """The connection's socket, as an object of its own that must be closed."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _receive_within(connection: Connection, seconds: int) -> None:
    """Bounds every wait for the other end; 0 is for ever."""
    with _socket(connection) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _tune(connection: Connection) -> None:
    with _socket(connection) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6):
            return
        # A message is several writes: none of them may wait for the other end to acknowledge the one before.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # macOS has not all of them.
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
