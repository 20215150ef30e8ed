"""Rendezvous of the ranks of the torch engine, through a key-value store of rank 0, which stops listening when all
have connected: ``torch.distributed`` needs the port. If that listens already (torchrun's agent), rank 0 writes its
address into that store, which others may change: it proves nothing. A control plane broadcasts it::

    rank 0                               rank 1
    listens at the master                connects           (1) a channel: both prove that they belong to the job
    ┌─────────┐
    │ values  │◄──── set, get, check ─── RendezvousStore    (2) host and address of each rank, in bounded time
    └─────────┘
    listens at its address               likewise           (3) Gloo connects each rank with each, or NCCL does
    ┌─────────┐
    │ ranks   │───── Loss ─────────────► PeerWatch          (4) from then on: which ranks are lost
    └─────────┘

All others hear of a lost rank from rank 0, with whose process each keeps a connection. A rank that leaves in order says
so, and is not lost::

    rank 1          rank 0 (its store)              rank 2
      ✗ ends ──────► the connection ends ──Loss──►  check(): PeerLostError: rank 1 …
      raises ─"leaves because of …"─► the same      before its process has ended, which may take seconds
      is cut off ──► silence.py ends it ──Loss──►   the same; rank 1 itself loses rank 0
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar, final

import numpy as np
import torch.distributed as dist  # noqa: TID253  (imported by the torch engine alone)

from choros import durations
from choros.comm.communicator import Communicator, bytes_of_first
from choros.errors import EngineError, EngineUnavailable, PeerLostError
from choros.observe import events
from choros.observe.events import Event, Kind
from choros.topology import Master, Topology
from choros.transport.address import LOOPBACK, Location, address_towards, is_loopback, outward_address, this_host
from choros.transport.channel import Channel, ChannelClosed, Listener, Unreachable, connect, connect_within, listen
from choros.transport.secret import Key, Signatures, rank_key, secret_in
from choros.wording import ranks_text

#: The key of a random value that rank 0 chooses for the job.
_JOB = "job"
#: How ranks are lost.
_ENDED = "was killed, or has ended"
_UNREACHABLE = "cannot be reached any more"

T = TypeVar("T")

_log = logging.getLogger("choros")
_stores: dict[Master, RendezvousStore] = {}
#: All stores: torch's objects use them and do not keep them alive.
_alive: list[RendezvousStore] = []


@contextlib.contextmanager
def translated(what: str, engine: str = "Gloo") -> Iterator[None]:
    """A context that raises the errors of torch's engines, all ``RuntimeError``, as ``EngineError``."""
    try:
        yield
    except EngineError:
        raise
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]\s]*:\d+\] ", "", str(error)).split(". This is typically")[0]
        lost = "by peer" in reason or "Broken pipe" in reason
        hint = ". Another rank has ended, or cannot be reached any more: see what it printed." if lost else ""
        raise EngineError(f"{engine} failed in {what}: {reason}{hint}") from error


@final
class _Values:
    """The values of the store, in the process of rank 0; ``ranks`` will connect."""

    def __init__(self, ranks: int) -> None:
        self._values = {_JOB: secrets.token_bytes(32)}
        self._lock = threading.Lock()
        self._missing = {_name(rank) for rank in range(ranks)}
        self._channels: dict[str, Channel] = {}
        self._gone: list[str] = []

    def listen(self, at: str | socket.socket, key: Key) -> None:
        """Listens in another thread until all ranks have connected."""
        with self._lock:
            self._listener = Listener(at, key, _name(0), self._serve)

    def _serve(self, channel: Channel, hello: str) -> None:
        with self._lock:
            self._channels[channel.peer] = channel
            self._missing.discard(channel.peer)
            if not self._missing:  # before any rank knows it, and may use the port
                self._listener.close()
        try:
            channel.send(socket.gethostname())
            while (request := channel.receive())[0] != "leave":
                channel.send(self._reply(*request))
            how = request[1]
        except ChannelClosed as error:
            how = _UNREACHABLE if error.silent else _ENDED
        self._leave(channel.peer, hello, how)

    def _leave(self, name: str, host: str, how: str) -> None:
        """Notes that a rank has gone, and tells the others ``how``; nothing, if it has left in order."""
        with self._lock:
            self._gone.append(name)
            del self._channels[name]
            # The own process last: it may end when it knows.
            others = sorted(self._channels.items(), key=lambda item: item[0] == _name(0))
        for _, channel in others if how else ():
            with contextlib.suppress(ChannelClosed):
                channel.send(Loss(int(name.removeprefix("rank ")), host, how))

    def _reply(self, operation: str, *given: Any) -> Any:
        operations: dict[str, Callable[..., Any]] = {
            "set": self._values.__setitem__,
            "get": lambda names: ([self._values.get(name) for name in names], self._gone),
            "add": self._add,
            "delete": lambda name: self._values.pop(name, None) is not None,
        }
        with self._lock:
            return operations[operation](*given)

    def _add(self, name: str, amount: int) -> int:
        total = int(self._values.get(name, b"0")) + amount
        self._values[name] = str(total).encode()
        return total


@final
class RendezvousStore(dist.Store):  # type: ignore[misc]  # torch has no types here
    """A store of ``torch.distributed`` whose values are in the process of rank 0, at the end of ``channel``."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.peers = PeerWatch()
        self._channel = channel
        self._lock = threading.Lock()
        self._replies: SimpleQueue[Any] = SimpleQueue()
        channel.send(socket.gethostname())
        self._host: str = channel.receive()
        threading.Thread(target=self._listen, name="choros: lost ranks", daemon=True).start()
        events.listen(self._crashed, [Kind.RANK_CRASHED])
        _alive.append(self)

    def leave(self, how: str = "") -> None:
        """Tells the other ranks that this one ends, and ``how``, if it is not in order."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send(("leave", how))

    def _crashed(self, event: Event) -> None:
        """An exception ends this process, which may take seconds. The others know already what they all have lost."""
        if event.name != PeerLostError.__name__:
            self.leave(f"was ended by {event.name}")

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed as error:
                self.peers.note(Loss(0, self._host, _UNREACHABLE if error.silent else _ENDED))
                self._replies.put(error)
                return
            if isinstance(message, Loss):
                self.peers.note(message)
            else:
                self._replies.put(message)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a value."""
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Returns a value; waits until it is set."""
        self.wait([key])
        return self.get_all([key])[0] or b""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all values are set, or raises an ``EngineUnavailable`` after ``timeout``."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"another rank did not connect within {limit.total_seconds():g} s.")
            time.sleep(durations.STORE_LOOK)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are set; a ``PeerLostError`` if not, and a rank has ended, for which all others would wait."""
        values, gone = self._ask("get", list(keys))
        if gone and None in values:
            ranks = [int(name.removeprefix("rank ")) for name in gone]
            raise PeerLostError(
                f"{' and '.join(gone)} ended before all ranks had connected: see what it printed.", ranks=ranks
            )
        return None not in values

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns values, ``None`` for those that are not set, without waiting for them."""
        return list(self._ask("get", list(keys))[0])

    def add(self, key: str, amount: int) -> int:
        """Adds to a number; returns the sum."""
        return int(self._ask("add", key, amount))

    def delete_key(self, key: str) -> bool:
        """Deletes a value; returns whether there was one."""
        return bool(self._ask("delete", key))

    #: The name under which the stores that torch puts before this one call it.
    deleteKey = delete_key  # noqa: N815

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            with contextlib.suppress(ChannelClosed):  # that comes as the reply, too
                self._channel.send(request)
            reply = self._replies.get()
        if isinstance(reply, ChannelClosed):
            self._replies.put(reply)
            self.peers.check([0], lambda: "the rendezvous of the ranks", grace=0)
        return reply


def peers_of(store: dist.Store) -> PeerWatch:
    """The ranks that have connected to ``store``; none, if it is that of one process."""
    return store.peers if isinstance(store, RendezvousStore) else PeerWatch()


def leave_stores() -> None:
    """Tells the other ranks that this process ends in order."""
    for store in _alive:
        store.leave()


def store_at(master: Master, topology: Topology, seconds: float) -> tuple[RendezvousStore, Signatures, str]:
    """Returns the store of the ranks that meet at ``master``, their signatures, and this rank's address for it. Ranks
    authenticate each other by ``CHOROS_SECRET``, else by a file of the user on one host, and not at all on several.
    """
    rank = topology.rank
    key = rank_key(os.environ, on_one_host=topology.local_size == topology.size)
    occupied = master.listens or dist.is_initialized()  # the latter by all ranks or by none
    if master not in _stores and rank == 0 and not occupied:
        _Values(topology.size).listen(_listening(master), key)
    if master in _stores:
        store, address = _stores[master], address_towards(master.host)
    elif occupied:
        address = _reach(master, rank, seconds)
        store, _ = _connected(_published(master, topology, address, key, seconds), key, rank, seconds)
    else:
        store, address = _connected(str(master), key, rank, seconds)
    _stores[master] = store
    return store, _signatures(store), address


def store_over(control: Communicator, seconds: float) -> tuple[dist.Store, Signatures, str]:
    """Like ``store_at``, for the ranks of ``control``: rank 0 broadcasts its address and a key through it."""
    if control.size == 1:
        return dist.HashStore(), Signatures(), LOOPBACK
    hosts = control.allgather(np.frombuffer(hashlib.blake2b(this_host().encode(), digest_size=8).digest(), np.int64))

    def offered() -> bytes:
        # If all ranks are on one host, other hosts must not be able to connect.
        listening = listen(LOOPBACK if (hosts == hosts[0]).all() else outward_address())
        secret = secrets.token_bytes(32)
        _Values(control.size).listen(listening, Key(secret))
        return json.dumps([*listening.getsockname()[:2], secret.hex()]).encode()

    host, port, hexadecimal = json.loads(bytes_of_first(control, offered, "the start of the ranks' store"))
    key = Key(bytes.fromhex(hexadecimal))
    store, address = _connected(str(Master(host, port)), key, control.rank, seconds)
    return store, _signatures(store), address


def exchange_locations(store: dist.Store, rank: int, size: int, address: str, seconds: float) -> list[Location]:
    """Returns the location of every rank, or raises an ``EngineUnavailable`` if one is not there within ``seconds``."""
    deadline = time.monotonic() + seconds
    keys = [f"location {other}" for other in range(size)]
    with translated("the rendezvous of the ranks"):
        store.set(keys[rank], json.dumps([this_host(), address, socket.gethostname(), os.getpid()]))
        report_at = time.monotonic() + durations.SLOW_CONNECT
        while not store.check(keys):
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{_missing(store, keys)} of {size} did not connect within "
                    f"{seconds:g} s. Were they started? CHOROS_START_TIMEOUT=SECONDS makes the others wait longer."
                )
            if time.monotonic() > report_at:
                _log.warning("waiting for %s of %d to connect, for %g s at most.", _missing(store, keys), size, seconds)
                report_at = deadline
            time.sleep(durations.STORE_LOOK)
        return [Location(*json.loads(store.get(key))) for key in keys]


def _missing(store: dist.Store, keys: Sequence[str]) -> str:
    return ranks_text([rank for rank, key in enumerate(keys) if not store.check([key])], None)


def _name(rank: int) -> str:
    return f"rank {rank}"


def _signatures(store: dist.Store) -> Signatures:
    """The signatures of the ranks: whoever reads along on the network does not know their key, if there is a secret."""
    return Signatures(hmac.digest(secret_in(os.environ) or b"", store.get(_JOB), "sha256"))


def _listening(master: Master) -> socket.socket:
    """A socket that listens only at ``master``, or at all addresses if other ranks could otherwise not connect."""
    try:
        host = str(socket.getaddrinfo(master.host, master.port, type=socket.SOCK_STREAM)[0][4][0])
        # This host's own name may be loopback here, and another address on other hosts.
        own_name = is_loopback(host) and not (is_loopback(master.host) or master.host == "localhost")
        try:
            return listen("" if own_name else host, master.port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        # The address belongs to a proxy of this host, such as a Kubernetes service.
        return listen("", master.port)
    except OSError as error:
        raise EngineUnavailable(
            f"rank 0 cannot listen at {master}, where the ranks connect: {error}. Give it a free port, by MASTER_PORT "
            "or in TF_CONFIG, and rank 0 the host of that name."
        ) from error


def _published(master: Master, topology: Topology, address: str, key: Key, seconds: float) -> str:
    """The address of rank 0, which it publishes in the store that ``torch.distributed`` has."""
    with translated(f"connecting to {master}"):
        if dist.is_initialized():
            board = dist.distributed_c10d._get_default_store()
        else:
            board = dist.TCPStore(master.host, master.port, is_master=False, timeout=timedelta(seconds=seconds))
        # torchrun keeps its store when it starts ranks again.
        name = f"choros: address of rank 0, start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if topology.rank == 0:
            if topology.local_size == topology.size:
                address = LOOPBACK
            elif is_loopback(address):
                address = outward_address()
            listening = listen(address)
            _Values(topology.size).listen(listening, key)
            board.set(name, str(Master(address, listening.getsockname()[1])))
        return str(board.get(name).decode())


def _connected(address: str, key: Key, rank: int, seconds: float) -> tuple[RendezvousStore, str]:
    """Waits until rank 0 listens at ``address``; returns its store, and the address from which this host reaches it."""
    channel = _patiently(lambda limit: connect(address, key, _name(rank), _name(0), limit), address, rank, seconds)
    return RendezvousStore(channel), channel.own_address


def _reach(master: Master, rank: int, seconds: float) -> str:
    """Waits until torch's store listens at ``master``; returns the address from which this host reaches it."""
    with _patiently(lambda limit: connect_within(str(master), limit), str(master), rank, seconds) as connection:
        return str(connection.getsockname()[0])


def _patiently(attempt: Callable[[float], T], address: str, rank: int, seconds: float) -> T:
    """Returns ``attempt(seconds)``, which waits for rank 0; says so after some seconds. An error if nothing answers."""
    left = seconds
    try:
        if seconds > durations.SLOW_CONNECT:
            with contextlib.suppress(Unreachable, OSError):
                return attempt(durations.SLOW_CONNECT)
            _log.warning("waiting for rank 0 to listen at %s, for %g s at most.", address, seconds)
            left -= durations.SLOW_CONNECT
        return attempt(left)
    except (Unreachable, OSError) as error:
        raise EngineUnavailable(
            f"rank {rank}: nothing answers at {address}, where the ranks connect, within {seconds:g} s "
            f"({error.__cause__ or error}). Is rank 0 started, on that host? Is the port open? "
            "CHOROS_START_TIMEOUT=SECONDS makes ranks wait longer."
        ) from error


@dataclass(frozen=True)
class Loss:
    """A rank that is lost, and its host; ``how`` is the end of a sentence that begins with the rank."""

    rank: int
    host: str
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.how}"


@final
class PeerWatch:
    """The ranks of this process's job, numbered as its launcher does, and which of them are lost.

    >>> peers = PeerWatch()
    >>> peers.note(Loss(1, "b", "has ended"))
    >>> peers.check([0, 2], lambda: "allreduce")
    >>> try:
    ...     peers.check([0, 1], lambda: "allreduce", grace=0)
    ... except PeerLostError as error:
    ...     print(error.ranks, str(error)[:53])
    (1,) allreduce cannot be completed: rank 1 on b has ended.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[Loss, float]] = {}
        self._changed = threading.Condition()

    def note(self, loss: Loss) -> None:
        """Records a loss, unless that rank is lost already."""
        with self._changed:
            self._losses.setdefault(loss.rank, (loss, time.monotonic()))
            self._changed.notify_all()

    def check(self, ranks: Sequence[int], waits_in: Callable[[], str], *, grace: float = durations.LOSS_GRACE) -> None:
        """Raises a ``PeerLostError`` if one of ``ranks``, for which this waits, was lost ``grace`` seconds ago."""
        if not self._losses:
            return
        with self._changed:
            losses = sorted((when, rank) for rank, (_, when) in self._losses.items() if rank in ranks)
            # What happens later may be its consequence.
            lost = [self._losses[rank][0] for when, rank in losses if when <= losses[0][0] + durations.LOSS_GRACE]
        if lost and losses[0][0] <= time.monotonic() - grace:
            others = "Its" if len(lost) == 1 else "Their"
            raise PeerLostError(
                f"{waits_in()} cannot be completed: {' and '.join(map(str, lost))}. {others} own output says why, if "
                "anything does. The job cannot go on without: start it again, from its last checkpoint.",
                ranks=[loss.rank for loss in lost],
            )

    @contextmanager
    def explaining(self, ranks: Sequence[int], waits_in: Callable[[], str]) -> Iterator[None]:
        """Turns an engine's error into a ``PeerLostError`` if one of ``ranks`` is lost; waits a moment for the news."""
        try:
            yield
        except PeerLostError:
            raise
        except EngineError:
            with self._changed:
                self._changed.wait_for(lambda: any(rank in self._losses for rank in ranks), durations.LOSS_REASON)
            self.check(ranks, waits_in, grace=0)
            raise
