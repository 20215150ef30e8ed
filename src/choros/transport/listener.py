"""Listeners: accept connections from other processes of the job."""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, final

from choros import durations
from choros.errors import EngineError
from choros.transport.channel import Channel, ChannelClosed, listen_at, not_authenticated
from choros.transport.handshake import Cut, accept_proof
from choros.transport.secret import Key

#: How many connections may be in their handshake. One more, and the oldest is closed: a process of the job needs
#: milliseconds for its proof, and connects again if it was closed.
_UNPROVEN = 64
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WARNINGS = 10

_log = logging.getLogger(__name__)


@final
class Listener:
    """Listens only at ``address``, and calls ``serve`` with the channel and the first message in a thread for each.
    Who proves nothing is closed after ``durations.PROOF``, earlier if they are many; ``refusal``: why the last was.
    """

    def __init__(
        self, address: str | socket.socket, key: Key, name: str, serve: Callable[[Channel, Any], None]
    ) -> None:
        self._key = key
        self._name = name
        self._serve = serve
        self.refusal = ""
        self._refusals = 0
        self._closed = False
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []
        try:
            self._listening = listen_at(address) if isinstance(address, str) else address
        except OSError as error:
            raise EngineError(
                f"this process cannot listen at {address}, its address in the cluster ({error}): another process may "
                "be listening there, or the address does not belong to this host."
            ) from error
        self._accepting = self._start(self._accept)

    def close(self) -> None:
        """Stops accepting connections; those already accepted stay open. Others may listen at the address then."""
        self._closed = True
        with contextlib.suppress(OSError):  # macOS: the socket is not connected
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listening.close()
        self._accepting.join(durations.LISTENER_PAUSE)  # macOS may leave it where it is

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                if error.errno in _FULL:
                    self._close_oldest()
                    time.sleep(durations.LISTENER_PAUSE)
                continue  # the process that connected has given up already
            with self._lock:
                self._unproven.append(end)
                full = len(self._unproven) > _UNPROVEN
            if full:
                self._close_oldest()
            self._start(self._greet, end, f"the process at {address[0]}" if address else "a process of this host")

    def _close_oldest(self) -> None:
        with self._lock, contextlib.suppress(OSError, IndexError):
            self._unproven.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _greet(self, end: socket.socket, peer: str) -> None:
        try:
            proved = accept_proof(end, self._key, self._name, durations.PROOF)
        except EngineError as error:
            end.close()
            refusal = str(not_authenticated(peer, error))
            if isinstance(error, Cut):  # it has ended, or will connect again
                _log.info("%s", refusal)
            else:
                self._warn(refusal)
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._unproven.remove(end)
        channel = Channel(end, *proved)
        try:
            first = channel.receive()
        except ChannelClosed:
            return  # It ended before it had identified itself.
        self._serve(channel, first)

    def _warn(self, refusal: str) -> None:
        """Warns of a refusal; of many, which anybody may cause, only of the first ones."""
        with self._lock:
            self._refusals += 1
            count, self.refusal = self._refusals, refusal
        if count <= _WARNINGS:
            further = " Further ones are not logged." if count == _WARNINGS else ""
            _log.warning("%s%s", refusal, further)

    @staticmethod
    def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread
