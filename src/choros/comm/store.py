"""Rendezvous of the ranks of the torch engine, through a key-value store that one process keeps.

::

    rank 0                          rank 1
    listen at the master            (torchrun's agent may listen there already: then all ranks are clients)
    connect ─────────┐ ┌─────────── connect                    (1) finds this rank's address towards it
                   ┌─┴─┴──┐
    host, address ─►│store │◄────── host, address               (2) all ranks' locations, in bounded time
                   └─┬─┬──┘
    listen at that ──┘ └─────────── listen at that             (3) Gloo connects each rank with each, or NCCL does

With a control plane, such as MPI, rank 0 opens the store at a free port and broadcasts its address through it.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch.distributed as dist  # noqa: TID253  (imported by the torch engine alone)

from choros.comm.communicator import Communicator
from choros.errors import EngineError, EngineUnavailable
from choros.topology import Master
from choros.transport.address import LOOPBACK, Location, is_loopback, outward_address, this_host
from choros.transport.endpoint import connect_within

__all__ = ["exchange_locations", "store_at", "store_over", "translated"]

#: The time between two polls of the store.
_POLL_SECONDS = 0.02
#: The maximum length of the address and port that rank 0 broadcasts.
_TEXT_BYTES = 128

_stores: dict[Master, dist.TCPStore] = {}


@contextmanager
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


def store_at(master: Master, rank: int, seconds: float) -> tuple[dist.Store, str]:
    """Returns the store at ``master``, which rank 0 opens if needed, and the address from which this rank reaches it.

    Raises:
        EngineUnavailable: nothing answers at ``master`` within ``seconds``.
    """
    if master not in _stores and rank == 0 and not master.listens:
        _stores[master] = _open(master, _listener(master), seconds)
    address = _reach(master, rank, seconds)
    if master not in _stores:
        _stores[master] = _connect(master, seconds)
    return _stores[master], address


def store_over(control: Communicator, seconds: float) -> tuple[dist.Store, str]:
    """Returns a new store that rank 0 of ``control`` opens, and the address from which this rank reaches it."""
    if control.size == 1:
        return dist.HashStore(), LOOPBACK
    hosts = control.allgather(np.frombuffer(hashlib.blake2b(this_host().encode(), digest_size=8).digest(), np.int64))
    text = np.zeros(_TEXT_BYTES, np.uint8)
    listener = None
    if control.rank == 0:
        # If all ranks are on one host, other hosts must not be able to connect.
        host = LOOPBACK if (hosts == hosts[0]).all() else outward_address()
        listener = socket.create_server((host, 0))
        encoded = json.dumps(listener.getsockname()).encode()
        text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    master = Master(*json.loads(control.broadcast(text, 0, name="address of the store").tobytes().rstrip(b"\0")))
    opened = _open(master, listener, seconds) if control.rank == 0 else None
    address = _reach(master, control.rank, seconds)
    return opened or _connect(master, seconds), address


def exchange_locations(store: dist.Store, rank: int, size: int, address: str, seconds: float) -> list[Location]:
    """Returns the location of every rank.

    Raises:
        EngineUnavailable: a rank has not connected within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    keys = [f"location {other}" for other in range(size)]
    with translated("the rendezvous of the ranks"):
        store.set(keys[rank], json.dumps([this_host(), address]))
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
                raise EngineUnavailable(
                    f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {size} did not connect within "
                    f"{seconds:g} s. Were they started? CHOROS_START_TIMEOUT=SECONDS makes the others wait longer."
                )
            time.sleep(_POLL_SECONDS)
        return [Location(*json.loads(store.get(key))) for key in keys]


def _listener(master: Master) -> socket.socket | None:
    """A socket that listens only at ``master``; ``None`` if other ranks could then not connect."""
    try:
        family, _, _, _, address = socket.getaddrinfo(master.host, master.port, type=socket.SOCK_STREAM)[0]
        host = str(address[0])
        if is_loopback(host) and not (is_loopback(master.host) or master.host == "localhost"):
            return None  # a host's own name, which other hosts resolve to another address
        return socket.create_server((host, master.port), family=family)
    except OSError:
        # The address belongs to a proxy of this host, such as a Kubernetes service, or this process listens there
        # already, for torch.distributed, which can share the port. Otherwise torch raises an error.
        return None


def _open(master: Master, listener: socket.socket | None, seconds: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            master.host,
            master.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except RuntimeError as error:
        raise EngineUnavailable(
            f"rank 0 cannot listen at {master}, where the ranks connect: {error}. Give it a free port, and rank 0 "
            "the host of that name."
        ) from error


def _connect(master: Master, seconds: float) -> dist.TCPStore:
    with translated(f"connecting to {master}"):
        return dist.TCPStore(master.host, master.port, is_master=False, timeout=timedelta(seconds=seconds))


def _reach(master: Master, rank: int, seconds: float) -> str:
    """Waits until a process listens at ``master``; returns the address from which this host reaches it."""
    try:
        with connect_within(str(master), seconds) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise EngineUnavailable(
            f"rank {rank}: nothing answers at {master}, where the ranks connect, within {seconds:g} s "
            f"({error}). Is rank 0 started, on that host? Is the port open? CHOROS_START_TIMEOUT=SECONDS makes "
            "ranks wait longer."
        ) from error
