"""Listeners: accept connections from other processes of the job."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, final

from choros.errors import EngineError
from choros.transport.channel import Channel, ChannelClosed, prove
from choros.transport.endpoint import listen_at

__all__ = ["Listener"]

_log = logging.getLogger(__name__)


@final
class Listener:
    """Listens at one address, and starts a thread for each process that connects.

    Args:
        address: ``host:port`` or ``unix:PATH``; no other address is opened.
        key: the job's key; connections from processes without it are refused.
        serve: called in the new thread with the channel and the first message, which identifies the peer.

    Raises:
        EngineError: listening there is not possible.
    """

    def __init__(self, address: str, key: bytes, serve: Callable[[Channel, Any], None]) -> None:
        self._key = key
        self._serve = serve
        try:
            self._listening = listen_at(address)
        except OSError as error:
            raise EngineError(
                f"this process cannot listen at {address}, its address in the cluster ({error}): another process may "
                "be listening there, or the address does not belong to this host."
            ) from error
        self._start(self._accept)

    def close(self) -> None:
        """Stops accepting connections; those already accepted stay open."""
        with contextlib.suppress(OSError):  # macOS: the socket is not connected
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._listening.accept()
            except OSError:
                return  # closed
            peer = f"the process at {address[0]}" if isinstance(address, tuple) else "a process of this host"
            self._start(self._greet, Connection(end.detach()), peer)

    def _greet(self, connection: Connection, peer: str) -> None:
        try:
            prove(connection, self._key, peer, listening=True)
            channel = Channel(connection, peer)
            first = channel.receive()
        except ChannelClosed:
            return  # It ended before it had identified itself.
        except EngineError as error:
            _log.warning("%s", error)
            return
        self._serve(channel, first)

    @staticmethod
    def _start(target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()
