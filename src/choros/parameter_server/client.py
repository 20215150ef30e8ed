"""The client of the parameter servers, for the chief and for workers."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any, final

from choros import durations
from choros.comm.waiting import LongWait, Reporter
from choros.errors import ParameterServerLost
from choros.parameter_server.messages import ServerCall, Shutdown
from choros.transport.channel import Channel, ChannelClosed, Failure


@final
class TaskConnection:
    """A channel to a worker or a parameter server; a long wait for its messages is reported as one in ``call``."""

    def __init__(self, channel: Channel, call: str, ranks: Sequence[int]) -> None:
        self.peer, self.send, self.close = channel.peer, channel.send, channel.close
        self._channel = channel
        self._describe = lambda: LongWait(call, ranks)

    def receive(self) -> Any:
        """Returns the next message."""
        with Reporter(self._describe) as reporter:
            while not wait([self._channel.fileno()], durations.SERVERS_LOOK):
                reporter.check()
        return self._channel.receive()


@final
class Servers:
    """The connections to all servers.
    ``failure`` keeps a request's last error, as frameworks that call Python from compiled code wrap it in their own.
    """

    def __init__(self, connections: Sequence[TaskConnection]) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._connections = connections

    def __len__(self) -> int:
        return len(self._connections)

    def request(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls ``method`` on servers with their ``arguments``, on all before any reply is awaited; returns replies."""
        try:
            with self._lock:
                for server, each in arguments.items():
                    with self._detecting_loss(server):
                        self._connections[server].send(ServerCall(method, each))
                replies = {}
                for server in arguments:
                    with self._detecting_loss(server):
                        replies[server] = self._connections[server].receive()
            for reply in replies.values():
                if isinstance(reply, Failure):
                    raise reply.error()
        except Exception as error:
            self.failure = error
            raise
        return replies

    def shutdown(self) -> None:
        """Ends the servers; only the chief calls it."""
        for connection in self._connections:
            with suppress(ChannelClosed):
                connection.send(Shutdown())
                connection.close()

    @contextmanager
    def _detecting_loss(self, server: int) -> Iterator[None]:
        try:
            yield
        except ChannelClosed as error:
            raise ParameterServerLost(
                f"{self._connections[server].peer} is lost, and with it the only copy of its shards of the variables "
                "and of the optimizer state. Restart the job from the last checkpoint."
            ) from error
