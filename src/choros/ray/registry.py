"""The registry of an executor: ranks ask it for the actors that they are tied to.

::

    rank ──── Take: number, machine ───► registry: an actor there that has no rank
         ◄─── Seat: address, GPUs ──────     none: the rank waits until there is one, for a while
         ──── number ───────────────────►    it has reached its actor
         ◄─── Vacancies ────────────────     so that rank 0 starts new ranks only for actors without one
         ──── Logged ───────────────────► the callbacks of ``run``
"""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from choros.errors import EngineError
from choros.ray.messages import REGISTRY, ActorPlace, Logged, Seat, Take, Vacancies
from choros.transport.address import LOOPBACK
from choros.transport.channel import Channel, ChannelClosed, Listener
from choros.transport.secret import Key

_log = logging.getLogger("choros")


@dataclass(eq=False)
class ReadyActor:
    """An actor that listens for a rank. ``number``: of the rank that should have it at the start of a job; ``rank``: of
    the one that it was given to; ``seated``: whether that one has reached it; ``used``: whether one has had it.
    """

    handle: Any
    place: ActorPlace
    number: int = -1
    rank: int | None = None
    channel: Channel | None = None
    seated: bool = False
    used: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_expected(self) -> bool:
        """Whether a rank of the job that starts will come to it: without an actor, it could not start."""
        return self.number >= 0 and not self.used


@final
class ActorRegistry:
    """Listens for ranks until ``close``; at ``ip``, ``None``: only for this machine's. A rank that has waited for
    ``seconds`` for an actor is refused.
    """

    def __init__(self, secret: str, ip: str | None, seconds: float) -> None:
        self._seconds = seconds
        self.is_reachable = ip is not None
        self.callbacks: Sequence[Callable[[Any], None]] = ()
        self._changed = threading.Condition()
        self._actors: list[ReadyActor] = []
        self._ranks: dict[Channel, Take] = {}
        self._calling = threading.Lock()
        self._closed = False
        listening = socket.create_server((LOOPBACK if ip is None else "", 0))
        self.address = f"{ip or LOOPBACK}:{listening.getsockname()[1]}"
        self._listener = Listener(listening, Key(bytes.fromhex(secret)), REGISTRY, self._serve)

    @property
    def actors(self) -> list[ReadyActor]:
        """Those that there are now."""
        with self._changed:
            return list(self._actors)

    def add(self, *actors: ReadyActor) -> None:
        """Adds actors, which ranks may be tied to from now on."""
        with self._changed:
            self._actors.extend(actors)
            self._changed.notify_all()
        self._tell()

    def remove(self, actor: ReadyActor) -> None:
        """Takes an actor away: no other rank gets it."""
        with self._changed:
            if actor in self._actors:
                self._actors.remove(actor)
        self._tell()

    def drop(self, actor: ReadyActor) -> None:
        """Takes an actor away that has ended, as Ray says; its rank ends, too, if the process is still there."""
        self.remove(actor)
        channel = actor.channel
        if channel is not None:
            channel.close()

    def wait(self, condition: Callable[[Sequence[ReadyActor]], bool], seconds: float) -> bool:
        """Waits until something is true of the actors; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._actors), seconds)

    def close(self) -> None:
        """Ends the ranks that are still connected."""
        self._listener.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for channel in list(self._ranks):
            channel.close()

    def _serve(self, channel: Channel, first: Any) -> None:
        if isinstance(first, Logged):
            with self._calling:
                for callback in self.callbacks:
                    try:
                        callback(first.info)
                    except Exception:  # noqa: BLE001  (the user's)
                        _log.exception("choros.ray: a callback of run has raised an error; the job goes on.")
            with suppress(ChannelClosed):
                channel.send(None)
        elif isinstance(first, Take):
            self._serve_rank(channel, first)

    def _serve_rank(self, channel: Channel, take: Take) -> None:
        actor = self._given(take, channel)
        if actor is None:
            with suppress(ChannelClosed):
                channel.send(self._seconds)
            return
        self._ranks[channel] = take
        try:
            channel.send(Seat(actor.place.address, actor.environ))
            self._tell()
            channel.receive()
            with self._changed:
                actor.seated = True
                self._changed.notify_all()
            channel.receive()  # it sends nothing more: it has ended
        except EngineError:
            pass
        finally:
            del self._ranks[channel]
            with self._changed:
                actor.rank, actor.channel, actor.seated = None, None, False
                self._changed.notify_all()
            self._tell()

    def _given(self, take: Take, channel: Channel) -> ReadyActor | None:
        with self._changed:
            lost = (take.machine, take.lost)
            self._actors = [each for each in self._actors if (each.place.machine, each.place.address) != lost]
            self._changed.wait_for(lambda: self._closed or self._free(take) is not None, self._seconds)
            actor = self._free(take)
            if actor is not None:
                actor.rank, actor.channel, actor.used = take.rank, channel, True
                self._changed.notify_all()
            return actor

    def _free(self, take: Take) -> ReadyActor | None:
        free = [each for each in self._actors if each.rank is None and each.place.machine == take.machine]
        return min(free, key=lambda each: each.number != take.rank, default=None)

    def _tell(self) -> None:
        with self._changed:
            free = Counter(each.place.machine for each in self._actors if each.rank is None)
        ranks = list(self._ranks.items())
        names = {take.host: take.machine for _, take in ranks if take.host}
        message = Vacancies({host: free[machine] for host, machine in names.items()})
        for channel, _ in ranks:
            with suppress(ChannelClosed):
                channel.send(message)
