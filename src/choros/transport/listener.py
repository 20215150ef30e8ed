"""Where a process of a job listens for the others."""

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
    """Listens at one address, and gives each process that connects to a thread of its own.

    Args:
        address: ``host:port``, or ``unix:PATH``; nothing else is listened at.
        key: the job's; a process that does not have it is turned away.
        serve: called in the new thread with the channel and the first message, which says who it is.

    Raises:
        EngineError: one cannot listen there.
    """

    def __init__(self, address: str, key: bytes, serve: Callable[[Channel, Any], None]) -> None:
        self._key = key
        self._serve = serve
        try:
            self._listening = listen_at(address)
        except OSError as error:
            raise EngineError(
                f"this process cannot listen at {address}, its address in the cluster ({error}): another process may "
                "listen there, or the address is not this host's."
            ) from error
        self._start(self._accept)

    def close(self) -> None:
        """Accepts no connection any more; those that it has accepted stay."""
        with contextlib.suppress(OSError):  # macOS: it is not connected
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
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
            return  # It ended before it had said who it is.
        except EngineError as error:
            _log.warning("%s", error)
            return
        self._serve(channel, first)

    @staticmethod
    def _start(target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()
