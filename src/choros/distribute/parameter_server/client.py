"""The client of the parameter servers, for the chief and for workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from numpy.typing import NDArray

from choros.distribute.parameter_server.messages import (
    Assign,
    Average,
    Changed,
    OptimizerRecipe,
    Pull,
    Push,
    Register,
    Shutdown,
)
from choros.distribute.parameter_server.placement import Placement, Shard, VariableKey
from choros.errors import ParameterServerLost
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.remote_errors import Failure

__all__ = ["Servers"]

Array = NDArray[Any]


@final
class Servers:
    """The connections to all parameter servers of a job.

    A request is sent to every server it concerns before any reply is awaited.

    Args:
        channels: one per server.
        receives: how the next message of each of them is received.
        slots: whether this process keeps copies of the optimizers' slots.

    Attributes:
        failure: the last error a request raised, kept here because frameworks that call Python from compiled code
            wrap it in an error of their own.
    """

    def __init__(
        self, channels: Sequence[Channel], receives: Sequence[Callable[[Channel], Any]], *, slots: bool
    ) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._channels = channels
        self._receives = receives
        self._slots = slots
        self._known = [0] * len(channels)
        self._undelivered: dict[Shard, Array] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def assign(self, values: Mapping[VariableKey, Array], placement: Placement) -> None:
        """Assigns values to variables."""
        self._request([Assign(part) if part else None for part in placement.split(values)])

    def register(self, optimizer: int, recipe: OptimizerRecipe, placement: Placement) -> None:
        """Registers the optimizer with every server that stores one of its variables."""
        concerned = [any(shard.variable in recipe.variables for shard in shards) for shards in placement.servers]
        self._request([Register(optimizer, recipe) if is_concerned else None for is_concerned in concerned])

    def pull(self) -> dict[Shard, Array]:
        """Returns the shards that changed since this process last received them."""
        self._record(self._request([Pull(known, self._slots) for known in self._known]))
        changed, self._undelivered = self._undelivered, {}
        return changed

    def push(
        self, optimizer: int, gradients: Mapping[VariableKey, Array], learning_rate: float | None, placement: Placement
    ) -> dict[VariableKey, Array]:
        """Sends gradients to be applied; returns the new values of their variables."""
        parts = placement.split(gradients)
        self._record(
            self._request(
                [
                    Push(optimizer, part, learning_rate, known) if part else None
                    for part, known in zip(parts, self._known, strict=True)
                ]
            )
        )
        return placement.join([{shard: self._undelivered.pop(shard) for shard in part} for part in parts])

    def average(self, optimizer: int) -> None:
        """Overwrites an optimizer's variables with their moving averages."""
        self._request([Average(optimizer)] * len(self))

    def shutdown(self) -> None:
        """Ends the servers; only the chief calls it."""
        for channel in self._channels:
            try:
                channel.send(Shutdown())
            except ChannelClosed:
                continue
            channel.close()

    def _record(self, replies: Sequence[Changed | None]) -> None:
        for server, reply in enumerate(replies):
            if reply is not None:
                self._known[server] = reply.version
                self._undelivered.update(reply.values)

    def _request(self, requests: Sequence[Any]) -> list[Any]:
        try:
            with self._lock:
                for channel, request in zip(self._channels, requests, strict=True):
                    if request is not None:
                        _detecting_loss(channel.send, channel, request)
                replies = [
                    _detecting_loss(receive, channel, channel) if request is not None else None
                    for channel, receive, request in zip(self._channels, self._receives, requests, strict=True)
                ]
            for reply in replies:
                if isinstance(reply, Failure):
                    raise reply.error()
        except Exception as error:
            self.failure = error
            raise
        return replies


def _detecting_loss(operation: Callable[..., Any], channel: Channel, *arguments: Any) -> Any:
    try:
        return operation(*arguments)
    except ChannelClosed as error:
        raise ParameterServerLost(
            f"{channel.peer} is lost, and with it the only copy of its shards of the variables and of the optimizer "
            "state. Restart the job from the last checkpoint."
        ) from error
