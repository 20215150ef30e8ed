"""The actors of an executor's ranks, and its registry, where ranks ask for the actors that they are tied to."""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from choros.errors import EngineError
from choros.ray.rank import REGISTRY, Take
from choros.transport.address import LOOPBACK
from choros.transport.channel import Channel, ChannelClosed, Listener
from choros.transport.secret import Key

_log = logging.getLogger("choros")
_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(eq=False)
class RankActor:
    """An actor that holds the resources of one rank. Ray gives what ``listening`` refers to, its ``place``, once it has
    room for it, and what ``ended`` does when it has ended; ``host``: where it was asked for, empty: anywhere.

    ``machine``: the same for all nodes of Ray's on a machine; ``address``: where its rank connects. ``number``: of the
    rank of a job that starts that will come to it, and could not start without an actor; -1: of none; ``rank``: of the
    one that it was given to; ``seated``: whether that one has reached it; ``leaves``: it is to end.
    """

    handle: Any
    listening: Any
    ended: Any
    host: str = ""
    node: str = ""
    machine: str = ""
    address: str = ""
    gpus: Sequence[str] = ()
    number: int = -1
    rank: int | None = None
    channel: Channel | None = None
    seated: bool = False
    leaves: bool = False

    def note_place(self, node: str, machine: str, address: str, gpus: Sequence[str]) -> None:
        """Notes that it listens, and where."""
        self.node, self.machine, self.address, self.gpus = node, machine, address, gpus


@final
class ActorRegistry:
    """Listens for ranks until ``close``, with the key ``secret``; at ``ip``, ``None``: only for this machine's. A rank
    that has waited for ``seconds`` for an actor is refused.
    """

    def __init__(self, secret: str, ip: str | None, seconds: float) -> None:
        self.secret = secret
        self._seconds = seconds
        self.is_reachable = ip is not None
        self.callbacks: Sequence[Callable[[Any], None]] = ()
        self._changed = threading.Condition()
        self._actors: list[RankActor] = []
        self._ranks: dict[Channel, Take] = {}
        self._calling = threading.Lock()
        self._closed = False
        listening = socket.create_server((LOOPBACK if ip is None else "", 0))
        self.address = f"{ip or LOOPBACK}:{listening.getsockname()[1]}"
        self._listener = Listener(listening, Key(bytes.fromhex(secret)), REGISTRY, self._serve)

    @property
    def actors(self) -> list[RankActor]:
        """Those that there are now."""
        with self._changed:
            return list(self._actors)

    def add(self, *actors: RankActor) -> None:
        """Adds actors, which ranks may be tied to from now on."""
        with self._changed:
            self._actors.extend(actors)
            self._changed.notify_all()
        self._tell()

    def remove(self, actor: RankActor) -> None:
        """Takes an actor away: no other rank gets it."""
        with self._changed:
            if actor in self._actors:
                self._actors.remove(actor)
        self._tell()

    def drop(self, actor: RankActor) -> None:
        """Takes an actor away that has ended, as Ray says; its rank ends, too, if the process is still there."""
        self.remove(actor)
        channel = actor.channel
        if channel is not None:
            channel.close()

    def wait(self, condition: Callable[[Sequence[RankActor]], bool], seconds: float) -> bool:
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
        if isinstance(first, Take):
            self._serve_rank(channel, first)
            return
        with self._calling:
            for callback in self.callbacks:
                try:
                    callback(first)
                except Exception:  # noqa: BLE001  (the user's)
                    _log.exception("choros.ray: a callback of run has raised an error; the job goes on.")
        with suppress(ChannelClosed):
            channel.send(None)

    def _serve_rank(self, channel: Channel, take: Take) -> None:
        actor = self._given(take, channel)
        if actor is None:
            with suppress(ChannelClosed):
                channel.send(self._seconds)
            return
        try:
            channel.send((actor.address, self._devices_on(actor.machine)))
            self._ranks[channel] = take  # from now on it hears which actors are vacant
            if self._closed:
                return
            self._tell()
            channel.receive()
            with self._changed:
                actor.seated = True
                self._changed.notify_all()
            channel.receive()  # it sends nothing more: it has ended
        except EngineError:
            pass
        finally:
            self._ranks.pop(channel, None)
            with self._changed:
                actor.rank, actor.channel, actor.seated = None, None, False
                self._changed.notify_all()
            self._tell()

    def _devices_on(self, machine: str) -> dict[str, str]:
        """The variable by which the ranks of a machine see the GPUs of all its actors: local rank n uses the n-th."""
        gpus = [gpu for each in self.actors if each.machine == machine for gpu in each.gpus]
        return {_DEVICES: ",".join(sorted(gpus, key=lambda gpu: (len(gpu), gpu)))} if gpus else {}

    def _given(self, take: Take, channel: Channel) -> RankActor | None:
        with self._changed:
            lost = (take.machine, take.lost)
            self._actors = [each for each in self._actors if (each.machine, each.address) != lost]
            self._changed.wait_for(lambda: self._closed or self._free(take) is not None, self._seconds)
            actor = self._free(take)
            if actor is not None:
                actor.rank, actor.channel, actor.number = take.rank, channel, -1
                self._changed.notify_all()
            return actor

    def _free(self, take: Take) -> RankActor | None:
        free = [each for each in self._actors if each.rank is None and each.machine == take.machine]
        return min(free, key=lambda each: each.number != take.rank, default=None)

    def _tell(self) -> None:
        """Says to the ranks how many actors have no rank, by the launcher's names of their hosts."""
        with self._changed:
            free = Counter(each.machine for each in self._actors if each.rank is None)
        ranks = list(self._ranks.items())
        names = {take.host: take.machine for _, take in ranks if take.host}
        vacant = {host: free[machine] for host, machine in names.items()}
        for channel, _ in ranks:
            with suppress(ChannelClosed):
                channel.send(vacant)
