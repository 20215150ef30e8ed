"""The way to the parameter servers, from the chief and from workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from numpy.typing import NDArray

from choros.distribute.parameter_server.messages import (
    Adopt,
    Assign,
    Average,
    Changed,
    OptimizerRecipe,
    Pull,
    Push,
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
    """All parameter servers of a job. Each request goes to all that it concerns, then the answers are awaited.

    Args:
        channels: one a server.
        slots: whether this process keeps what optimizers do.

    Attributes:
        failure: what a request raised; frameworks that call the host from compiled code hide it in an error of theirs.
    """

    def __init__(self, channels: Sequence[Channel], *, slots: bool) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._channels = channels
        self._slots = slots
        self._known = [0] * len(channels)
        self._unseen: dict[Shard, Array] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def assign(self, values: Mapping[VariableKey, Array], placement: Placement) -> None:
        """Gives variables these values."""
        self._ask([Assign(part) if part else None for part in placement.split(values)])

    def adopt(self, optimizer: int, recipe: OptimizerRecipe, placement: Placement) -> None:
        """Sees to it that the servers have this optimizer."""
        here = [any(shard.variable in recipe.variables for shard in shards) for shards in placement.servers]
        self._ask([Adopt(optimizer, recipe) if any_here else None for any_here in here])

    def pull(self) -> dict[Shard, Array]:
        """The shards that changed since they were last given to this process."""
        self._note(self._ask([Pull(known, self._slots) for known in self._known]))
        changed, self._unseen = self._unseen, {}
        return changed

    def push(
        self, optimizer: int, gradients: Mapping[VariableKey, Array], learning_rate: float | None, placement: Placement
    ) -> dict[VariableKey, Array]:
        """Has gradients applied; returns the new values of their variables."""
        parts = placement.split(gradients)
        self._note(
            self._ask(
                [
                    Push(optimizer, part, learning_rate, known) if part else None
                    for part, known in zip(parts, self._known, strict=True)
                ]
            )
        )
        return placement.join([{shard: self._unseen.pop(shard) for shard in part} for part in parts])

    def average(self, optimizer: int) -> None:
        """Puts an optimizer's moving averages in the place of its variables."""
        self._ask([Average(optimizer)] * len(self))

    def shutdown(self) -> None:
        """From the chief: the servers may end."""
        for channel in self._channels:
            try:
                channel.send(Shutdown())
            except ChannelClosed:
                continue
            channel.close()

    def _note(self, answers: Sequence[Changed | None]) -> None:
        for server, answer in enumerate(answers):
            if answer is not None:
                self._known[server] = answer.version
                self._unseen.update(answer.values)

    def _ask(self, requests: Sequence[Any]) -> list[Any]:
        try:
            with self._lock:
                asked = [request is not None for request in requests]
                for channel, request in zip(self._channels, requests, strict=True):
                    if request is not None:
                        _noticing_loss(channel.send, channel, request)
                answers = [
                    _noticing_loss(channel.receive, channel) if expected else None
                    for channel, expected in zip(self._channels, asked, strict=True)
                ]
            for answer in answers:
                if isinstance(answer, Failure):
                    raise answer.error()
        except Exception as error:
            self.failure = error
            raise
        return answers


def _noticing_loss(act: Callable[..., Any], channel: Channel, *arguments: Any) -> Any:
    try:
        return act(*arguments)
    except ChannelClosed as error:
        raise ParameterServerLost(
            f"{channel.peer} is gone, and with it its part of the variables and of the optimizer state, which exist "
            "nowhere else. Start the job again, from the last checkpoint."
        ) from error
