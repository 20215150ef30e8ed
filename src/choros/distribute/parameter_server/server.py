"""The process of a parameter server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, final

from choros.distribute.parameter_server.cluster import CHIEF
from choros.distribute.parameter_server.messages import Assign, Average, Hello, Pull, Push, Register, Shutdown
from choros.distribute.parameter_server.shards import Shards
from choros.errors import EngineError
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.listener import Listener
from choros.transport.remote_errors import Failure
from choros.transport.secret import Key

__all__ = ["ParameterServer"]

_log = logging.getLogger(__name__)


@final
class ParameterServer:
    """Stores shards of the variables and serves them to the chief and the workers of a job.

    Args:
        address: the address to listen at.
        key: the job's key.
        name: the name of this process.
    """

    def __init__(self, address: str, key: Key, name: str) -> None:
        self._shards = Shards()
        self._chief_connected = threading.Event()
        self._ended = threading.Event()
        self._shutdown_received = False
        self._listener = Listener(address, key, name, self._serve)

    def run(self, start_seconds: float) -> None:
        """Serves until the chief ends the job.

        Raises:
            EngineError: the chief did not connect in time, or its connection closed before it ended the job.
        """
        if not self._chief_connected.wait(start_seconds):
            raise EngineError(
                f"the chief did not connect to this parameter server within {start_seconds:g} s: check that it was "
                "started. CHOROS_START_TIMEOUT sets the time limit."
            )
        self._ended.wait()
        self._listener.close()
        if not self._shutdown_received:
            raise EngineError("the connection to the chief closed before the job ended: see the chief's output.")

    def _serve(self, channel: Channel, _hello: Hello) -> None:
        if channel.peer == CHIEF:
            self._chief_connected.set()
        try:
            while True:
                self._reply_to(channel, channel.receive())
        except ChannelClosed:
            if channel.peer == CHIEF:
                self._ended.set()
            else:
                _log.info("%s disconnected", channel.peer)

    def _reply_to(self, channel: Channel, message: Any) -> None:
        if isinstance(message, Shutdown):
            self._shutdown_received = True
            self._ended.set()
            return
        handlers: dict[type, Callable[[Any], Any]] = {
            Pull: self._shards.pull,
            Push: self._shards.push,
            Assign: self._shards.assign,
            Register: self._shards.register,
            Average: self._shards.average,
        }
        try:
            reply = handlers[type(message)](message)
        except Exception as error:  # noqa: BLE001  (every error is reported to the client)
            reply = Failure.of(error)
        channel.send(reply)
