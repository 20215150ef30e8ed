"""Where a process of a job listens for the others."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, final

from choros.errors import EngineError
from choros.topology import split_address
from choros.transport.channel import Channel, ChannelClosed, prove

__all__ = ["Door"]

_log = logging.getLogger(__name__)


@final
class Door:
    """Listens at one address, and gives each process that connects to a thread of its own.

    Args:
        address: ``host:port``; nothing else is listened at.
        key: the job's; who does not have it is turned away.
        serve: called in the new thread with the channel and the first message, which says who it is.

    Raises:
        EngineError: one cannot listen there.
    """

    def __init__(self, address: str, key: bytes, serve: Callable[[Channel, Any], None]) -> None:
        self._key = key
        self._serve = serve
        host, port = split_address(address)
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            raise EngineError(
                f"this process cannot listen at {address}, its address in the cluster ({error}): another process may "
                "listen there, or the address is not this host's."
            ) from error
        self._start(self._accept)

    def close(self) -> None:
        """Lets nobody in any more; who is in stays."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                end, (host, *_) = self._listener.accept()
            except OSError:
                return  # closed
            self._start(self._let_in, Connection(end.detach()), f"the process at {host}")

    def _let_in(self, connection: Connection, peer: str) -> None:
        try:
            prove(connection, self._key, peer, listening=True)
            channel = Channel(connection, peer)
            first = channel.receive()
        except ChannelClosed:
            return  # It is not there any more to be told.
        except EngineError as error:
            _log.warning("%s", error)
            return
        self._serve(channel, first)

    @staticmethod
    def _start(target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()
