"""The process of a parameter server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

from choros.distribute.parameter_server.cluster import CHIEF, Cluster, this_process
from choros.distribute.parameter_server.jobs import Jobs, end_at_exit
from choros.distribute.parameter_server.messages import Assign, Average, Hello, Pull, Push, Register, Shutdown
from choros.distribute.parameter_server.shards import Shards
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.listener import Listener
from choros.transport.remote_errors import Failure

__all__ = ["ParameterServer"]

_log = logging.getLogger(__name__)


@final
class ParameterServer:
    """Stores shards of the variables and serves them to the chief and the workers of a job.

    A job begins when its chief connects, and its variables are forgotten when the chief's connection closes. A server
    may serve several jobs, as in a process that creates one strategy after another.

    Args:
        cluster: the processes; this one is a parameter server.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._waiting = Jobs()
        self._jobs: dict[str, Shards] = {}
        self._listener = Listener(cluster.address, cluster.key, cluster.name, self._serve)

    def run(self) -> None:
        """Waits until the first chief has ended its job.

        Raises:
            EngineError: the chief did not connect in time.
            PeerLostError: its connection closed before it ended the job.
        """
        self._waiting.wait(self._cluster, self._listener)

    def close(self) -> None:
        """Accepts no more connections."""
        self._listener.close()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        end_at_exit(channel)
        if channel.peer != CHIEF:
            self._answer(channel, hello, self._jobs.get(hello.job, Shards()))
            return
        with self._waiting.job(hello.job) as job:
            self._jobs[hello.job] = Shards()
            try:
                if self._answer(channel, hello, self._jobs[hello.job]):
                    job.ended_in_order()
            finally:
                del self._jobs[hello.job]

    def _answer(self, channel: Channel, hello: Hello, shards: Shards) -> bool:
        """Answers a client's requests; returns whether it has ended the job."""
        # Compiled updates need threads of the framework, which steps may hold that wait for the update.
        shards.compiled &= hello.process != this_process()
        try:
            while not isinstance(message := channel.receive(), Shutdown):
                channel.send(_reply(shards, message))
        except ChannelClosed:
            _log.info("%s disconnected", channel.peer)
            return False
        return True


def _reply(shards: Shards, message: Any) -> Any:
    handlers: dict[type, Callable[[Any], Any]] = {
        Pull: shards.pull,
        Push: shards.push,
        Assign: shards.assign,
        Register: shards.register,
        Average: shards.average,
    }
    try:
        return handlers[type(message)](message)
    except Exception as error:  # noqa: BLE001  (every error is reported to the client)
        return Failure.of(error)
