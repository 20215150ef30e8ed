"""The engine of ranks that MPI did not start: Gloo moves host arrays, after a rendezvous by ``store.py``, in private
groups of ``torch.distributed``. The default group is never created: Keras from 3.16 on would then wrap a model in
DistributedDataParallel, and average gradients a second time; and the user's script can call ``init_process_group``
itself.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros import durations
from choros.comm.communicator import Communicator
from choros.comm.fusion import chunk_bytes
from choros.comm.reduction import UFUNCS, Array, Reduction, loses_nans
from choros.comm.request import caller
from choros.errors import EngineUnavailable
from choros.settings import VARIABLES, current
from choros.topology import WITHOUT_MPI, Master, Topology, find_master, shard_range
from choros.transport.address import LOOPBACK, own_address
from choros.transport.peers import connections_of_this_user
from choros.transport.secret import secret_in

try:
    import torch
    import torch.distributed as dist
except ImportError as _error:
    raise EngineUnavailable(
        f"the torch engine needs PyTorch, which cannot be imported ({_error}): pip install torch. Without it, start "
        "the script with chorosrun."
    ) from _error

from choros.comm.store import (
    PeerWatch,
    RendezvousStore,
    exchange_locations,
    leave_stores,
    peers_of,
    store_at,
    store_over,
    translated,
)
from choros.comm.store_watch import StallWatch, StragglerWatch
from choros.comm.waiting import Awaited, Reporter
from choros.transport.secret import Signatures

#: The dtypes that Gloo reduces itself.
_GLOO_DTYPES = frozenset(
    np.dtype(name) for name in ("int8", "uint8", "int32", "int64", "float16", "float32", "float64")
)

_OPS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}
#: An hour before a rank's next collective is no error. A rank that dies closes its connections.
FOREVER = timedelta(days=365)
#: The interval at which Python can handle Ctrl-C.
_NAP = timedelta(seconds=durations.NAP)

_starts = itertools.count()
_stall_watch: StallWatch | None = None
_straggler_watch: StragglerWatch | None = None
_log = logging.getLogger("choros")


@final
class TorchCommunicator(Communicator):
    """Ranks that are processes, connected with each other by Gloo; ``peers`` knows which ranks are lost."""

    engine = "torch"

    def __init__(
        self,
        store: dist.Store,
        signatures: Signatures,
        rank: int,
        launched: Sequence[int],
        address: str,
        seconds: float,
        peers: PeerWatch,
    ) -> None:
        """Connects the members within ``seconds``; all call it, with the members' own store and signatures."""
        super().__init__(rank, launched)
        self.peers = peers
        self.signatures = signatures
        self.address = address
        self._store = store
        self._seconds = seconds
        self._branches = itertools.count()
        #: The ranks that a collective waits for, and what says in which call.
        self.waits = self.launched, self._waits_in
        self._check = functools.partial(peers.check, *self.waits)
        waits = self.launched, lambda: "the connection of the ranks"
        with peers.explaining(*waits):
            self._group = gloo_group(store, rank, self.size, address, seconds, functools.partial(peers.check, *waits))

    def _waits_in(self) -> str:
        return f"{self._asked} at {caller() or 'unknown location'}"

    def _wait(self, what: str, start: Callable[[], Any], transfer: float = math.inf) -> None:
        """Starts a collective of Gloo's, or some, and waits for it: for the data if all ranks have agreed before."""
        with self.peers.explaining(*self.waits), translated(what):
            started = start()
            for work in started if isinstance(started, list) else [started]:
                wait_on_host(work, self._check, self._long_wait, transfer)

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        table = np.empty(2 * self.size, np.int64)
        # Gloo's threads sleep while they wait, also those of a rank that waits for the others to end.
        self._wait(
            "the check of a collective",
            lambda: self._group._allgather_base(torch.from_numpy(table), torch.from_numpy(header)),
            durations.EXCHANGE,
        )
        return table.reshape(self.size, 2)

    def _allreduce(self, buffer: Array, op: Reduction) -> None:
        if buffer.dtype in _GLOO_DTYPES and not loses_nans(op, buffer.dtype):
            self._wait("allreduce", lambda: self._group.allreduce([torch.from_numpy(buffer)], allreduce_options(op)))
            return
        shares = [shard_range(buffer.size, rank, self.size) for rank in range(self.size)]
        counts = [end - start for start, end in shares]
        part = self._reducescatter(buffer, counts, op)
        buffer.view(np.uint8)[...] = self._allgather(part.view(np.uint8), [n * buffer.itemsize for n in counts])

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        received = np.empty(sum(counts), np.uint8)
        self._wait(
            "allgather",
            lambda: start_allgather(self._group, _tensor(send), torch.from_numpy(received), counts, self.rank),
        )
        return received

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        self._wait("broadcast", lambda: self._group.broadcast([torch.from_numpy(buffer)], broadcast_options(root)))

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: Reduction) -> Array:
        # Gloo's own supports only equal parts, and not every dtype.
        size = counts[self.rank] * buffer.itemsize
        parts = self._alltoall(buffer.view(np.uint8), [n * buffer.itemsize for n in counts], [size] * self.size)
        result: Array = UFUNCS[op].reduce(parts.view(buffer.dtype).reshape(self.size, -1), axis=0, dtype=buffer.dtype)
        return result

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        received = np.empty(sum(receive_counts), np.uint8)
        sent = _tensor(send[: sum(send_counts)])
        counts = list(receive_counts), list(send_counts)
        self._wait("alltoall", lambda: self._group.alltoall_base(torch.from_numpy(received), sent, *counts))
        return received

    def _split(self, ranks: Sequence[int]) -> TorchCommunicator | None:
        store, signatures = self.branch()
        if self.rank not in ranks:
            return None
        members = [self.launched[rank] for rank in ranks]
        rank = list(ranks).index(self.rank)
        return TorchCommunicator(store, signatures, rank, members, self.address, self._seconds, self.peers)

    def branch(self) -> tuple[dist.Store, Signatures]:
        """A new store for members, and its signatures; all of them must call it."""
        name = f"branch {next(self._branches)}"
        return dist.PrefixStore(name, self._store), self.signatures.branch(name)

    def _close(self) -> None:
        del self._group

    def abandon(self) -> None:
        """Joins Gloo's threads: one that still frees an array after the interpreter's end would abort the process."""
        self._close()


def start(topology: Topology, comm: Sequence[int] | None = None) -> tuple[TorchCommunicator, Topology]:
    """Connects all ranks, where torchrun, ``TF_CONFIG`` or MPI's rank 0 say; returns the communicator, and this rank's
    position, derived from the ranks' hosts.
    """
    global _stall_watch, _straggler_watch
    config = current()
    seconds = config.start_timeout
    store: dist.Store = dist.HashStore()
    signatures = Signatures()
    address = LOOPBACK
    if topology.size > 1 and topology.launcher in WITHOUT_MPI:
        store, signatures, address = store_at(_master(topology), topology, seconds)
    elif topology.size > 1:
        from choros.comm.engines import mpi

        control, topology = mpi.start(topology, comm)
        comm = None
        store, signatures, address = store_over(control, seconds)
        control.close()
    # Each start uses different keys: ranks may leave and join many times.
    name = f"choros {next(_starts)}"
    peers, of_all_starts = peers_of(store), store
    store, signatures = dist.PrefixStore(name, store), signatures.branch(name)
    locations = exchange_locations(store, topology.rank, topology.size, address, seconds)
    if _stall_watch is not None:  # of an earlier start
        _stall_watch.stop()
        _stall_watch = None
    if isinstance(of_all_starts, RendezvousStore) and topology.launcher in WITHOUT_MPI:
        if config.stall_seconds:
            _stall_watch = StallWatch(of_all_starts, topology.rank, config.stall_seconds, locations)
        _straggler_watch = _straggler_watch or StragglerWatch(of_all_starts, topology.rank, topology.size)
    address = own_address(locations, topology.rank)
    communicator = TorchCommunicator(store, signatures, topology.rank, range(topology.size), address, seconds, peers)
    communicator.chunk_bytes = chunk_bytes(config.fusion_bytes)
    if comm is not None:
        communicator = communicator.only(comm)
        locations = [locations[rank] for rank in sorted(comm)]
    hosts = [location.host for location in locations]
    if topology.launcher in WITHOUT_MPI and communicator.rank == 0:
        _warn_of_open_network(hosts)
    return communicator, Topology.from_hosts(hosts, communicator.rank, launcher=topology.launcher)


def finalize() -> None:
    """Tells the other ranks, and ends MPI if it was the control plane; call it once, when the process ends."""
    for watch in (_stall_watch, _straggler_watch):
        if watch is not None:
            watch.stop()
    leave_stores()
    mpi = sys.modules.get("choros.comm.engines.mpi")
    if mpi is not None:
        mpi.finalize()


def _warn_of_open_network(hosts: Sequence[str]) -> None:
    """Says that ranks on several hosts cannot tell each other from strangers, if they have no secret."""
    several = len(set(hosts))
    if several > 1 and secret_in(os.environ) is None:
        _log.warning(
            "%s is not set, and the ranks are on %d hosts: whoever reaches them there can join them, read and change "
            "what they send, and run code as this user. Trust the network, or set it, the same on every rank.",
            VARIABLES["secret"].name,
            several,
        )


def _master(topology: Topology) -> Master:
    master = find_master(os.environ, topology.launcher)
    if master is None:
        raise EngineUnavailable(
            f"{topology.launcher} started {topology.size} ranks, but MASTER_ADDR and MASTER_PORT are not "
            f"set: the address at which they connect. Set both on every rank to an address of rank 0's host and a free "
            f"port of it. Or: Start the script with chorosrun -np {topology.size}, which needs neither."
        )
    return master


def _tensor(array: Array) -> torch.Tensor:
    """Shares memory with ``array`` unless it is read-only, which no tensor can be."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


# ── groups of torch.distributed ──────────────────────────────────────────────────────────────────


def gloo_group(store: dist.Store, rank: int, size: int, address: str, seconds: float, check: Callable[[], None]) -> Any:
    """Connects members by Gloo at ``address``, or ``GLOO_SOCKET_IFNAME``; ``check`` raises what ends the wait."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    ends = [{"interface": name} for name in names if name] or [{"hostname": address}]
    options = dist.ProcessGroupGloo._Options()
    # Gloo lets in the first that comes. Between hosts, nothing says which process that was.
    with translated("connecting the ranks"), connections_of_this_user():
        options._devices = [dist.ProcessGroupGloo.create_device(**end) for end in ends]
        options._timeout = timedelta(seconds=seconds)
        # In C++, which nothing interrupts: in another thread.
        connected: Future[Any] = Future()

        def connect() -> None:
            try:
                connected.set_result(dist.ProcessGroupGloo(store, rank, size, options))
            except BaseException as error:  # noqa: BLE001  (who waits raises it)
                connected.set_exception(error)

        threading.Thread(target=connect, name="choros: Gloo connects", daemon=True).start()
        while not wait([connected], _NAP.total_seconds()).done:
            check()
        group = connected.result()
    group._set_default_timeout(FOREVER)
    return group


def wait_on_host(
    work: Any, check: Callable[[], None], describe: Callable[[], Awaited] | None = None, transfer: float = math.inf
) -> None:
    """Waits for a collective of host tensors, which takes ``transfer`` seconds if all are there; ``check`` raises what
    ends it. The thread sleeps a tenth of a second at most, after which Python can handle Ctrl-C.
    """
    with Reporter(describe, transfer=transfer) as reporter:
        while not work.is_completed():
            with suppress(RuntimeError):
                work.wait(_NAP)
            reporter.check()
            check()
    work.wait()


def start_allgather(
    group: Any, send: torch.Tensor, received: torch.Tensor, counts: Sequence[int], rank: int
) -> list[Any]:
    """Starts to concatenate the ranks' rows, ``counts[i]`` of rank ``i``, in ``received``."""
    if len(set(counts)) == 1:
        return [group._allgather_base(received, send)]
    parts = torch.split(received, list(counts))
    parts[rank].copy_(send)
    return [group.broadcast([part], broadcast_options(root)) for root, part in enumerate(parts)]


def allreduce_options(op: Reduction) -> Any:
    """The options of an allreduce with ``op``."""
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return options


def broadcast_options(root: int) -> Any:
    """The options of a broadcast from ``root``."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options
