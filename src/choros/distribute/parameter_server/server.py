"""A parameter server's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, final

from choros.distribute.parameter_server.messages import Adopt, Assign, Average, Hello, Pull, Push, Shutdown
from choros.distribute.parameter_server.shards import Shards
from choros.errors import EngineError
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.listener import Listener
from choros.transport.remote_errors import Failure

__all__ = ["ParameterServer"]

_log = logging.getLogger(__name__)


@final
class ParameterServer:
    """Holds its part of the variables for the chief and the workers of a job.

    Args:
        address: where it listens.
        key: the job's.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self._shards = Shards()
        self._chief_came = threading.Event()
        self._over = threading.Event()
        self._done = False
        self._listener = Listener(address, key, self._serve)

    def run(self, start_seconds: float) -> None:
        """Serves until the chief is done.

        Raises:
            EngineError: the chief did not come in time, or ended without a word.
        """
        if not self._chief_came.wait(start_seconds):
            raise EngineError(
                f"no chief has connected to this parameter server within {start_seconds:g} s: check that it was "
                "started. CHOROS_START_TIMEOUT sets how long to wait."
            )
        self._over.wait()
        self._listener.close()
        if not self._done:
            raise EngineError("the chief has ended before it was done: see what it printed.")

    def _serve(self, channel: Channel, hello: Hello) -> None:
        channel.peer = f"{hello.role} {hello.index}"
        if hello.role == "chief":
            self._chief_came.set()
        try:
            while True:
                self._answer(channel, channel.receive())
        except ChannelClosed:
            if hello.role == "chief":
                self._over.set()
            else:
                _log.info("%s is gone", channel.peer)

    def _answer(self, channel: Channel, message: Any) -> None:
        if isinstance(message, Shutdown):
            self._done = True
            self._over.set()
            return
        answers: dict[type, Callable[[Any], Any]] = {
            Pull: self._shards.pull,
            Push: self._shards.push,
            Assign: self._shards.assign,
            Adopt: self._shards.adopt,
            Average: self._shards.average,
        }
        try:
            answer = answers[type(message)](message)
        except Exception as error:  # noqa: BLE001  (whatever went wrong is the caller's to know)
            answer = Failure.of(error)
        channel.send(answer)
