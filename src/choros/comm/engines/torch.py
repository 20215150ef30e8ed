"""The engine of ranks that MPI did not start, and of tensors that stay on their device: ``torch.distributed``.

``TorchCommunicator`` moves host arrays through Gloo, so that any framework can be trained by ranks of torchrun or of
``TF_CONFIG``. ``DeviceGroup`` moves torch's tensors where they lie, on GPUs through NCCL; any communicator is the
control plane it needs.

Groups are private: the default group of ``torch.distributed`` is never made. Keras from 3.16 on wraps a model in
DistributedDataParallel as soon as ``torch.distributed.is_initialized()``, and would average what we have averaged; the
user's own ``init_process_group`` stays free as well.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.comm.communicator import Array, Communicator
from choros.comm.reduction import UFUNCS, ReduceOp, check_dtype, working_op
from choros.comm.request import Request
from choros.comm.work import WorkQueue
from choros.config import Config
from choros.errors import ConfigError, EngineError, EngineUnavailable
from choros.topology import WITHOUT_MPI, Master, Topology, find_master, shard_range
from choros.transport.address import LOOPBACK, Place, address_towards, choose_address, is_loopback

try:
    import torch
    import torch.distributed as dist
except ImportError as _error:
    raise EngineUnavailable(
        f"the torch engine needs PyTorch, which cannot be imported ({_error}): pip install torch. Without it, start "
        "the script with chorosrun."
    ) from _error

from choros.comm.store import exchange_places, store_at, store_over, translated

__all__ = ["DeviceGroup", "TorchCommunicator", "finalize", "start"]

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
#: What Gloo reduces itself.
_GLOO_DTYPES = frozenset(
    np.dtype(name) for name in ("int8", "uint8", "int32", "int64", "float16", "float32", "float64")
)
#: Another rank may take an hour to its next collective: that is no error. A rank that dies closes its connections.
_FOREVER = timedelta(days=365)
#: Between two of the moments in which Python can answer Ctrl-C.
_NAP = timedelta(seconds=0.5)
#: The first NCCL that lets ranks share a card, if it is told to.
_NCCL_SHARES_CARDS = (2, 30)
_SHARE_CARDS = "NCCL_MULTI_RANK_GPU_ENABLE"

_starts = itertools.count()


# ── host arrays ──────────────────────────────────────────────────────────────────────────────────


@final
class TorchCommunicator(Communicator):
    """Ranks that are processes, connected with each other by Gloo.

    Attributes:
        address: where this rank listens.
    """

    moves_tensors = True

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], address: str, queue: WorkQueue, seconds: float
    ) -> None:
        """Connects the members; all of them must be there.

        Args:
            store: the members' own.
            rank: this process among them.
            ranks: their global ranks.
            address: where this rank listens.
            queue: the process's one.
            seconds: how long connecting may take.
        """
        super().__init__(rank, ranks, queue)
        self.address = address
        self._store = store
        self._seconds = seconds
        self._branches = itertools.count()
        self._group = _gloo_group(store, rank, self.size, address, seconds)

    def branch(self) -> dist.Store:
        """A new store for members, who must all call it."""
        return dist.PrefixStore(f"branch {next(self._branches)}", self._store)

    def _exchange(self, header: NDArray[np.int64]) -> NDArray[np.int64]:
        table = np.empty(2 * self.size, np.int64)
        # Gloo's threads sleep while they wait, also those of a rank that waits for the others to end.
        with translated("the check of a collective"):
            _wait(self._group._allgather_base(torch.from_numpy(table), torch.from_numpy(header)))
        return table.reshape(self.size, 2)

    def _allreduce(self, buffer: Array, op: ReduceOp) -> None:
        if buffer.dtype in _GLOO_DTYPES:
            with translated("allreduce"):
                _wait(self._group.allreduce([torch.from_numpy(buffer)], _allreduce_options(op)))
            return
        shares = [shard_range(buffer.size, rank, self.size) for rank in range(self.size)]
        counts = [end - start for start, end in shares]
        part = self._reducescatter(buffer, counts, op)
        buffer.view(np.uint8)[...] = self._allgather(part.view(np.uint8), [n * buffer.itemsize for n in counts])

    def _allgather(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        received = np.empty(sum(counts), np.uint8)
        with translated("allgather"):
            for work in _gather(self._group, _tensor(send), torch.from_numpy(received), counts, self.rank):
                _wait(work)
        return received

    def _broadcast(self, buffer: NDArray[np.uint8], root: int) -> None:
        with translated("broadcast"):
            _wait(self._group.broadcast([torch.from_numpy(buffer)], _broadcast_options(root)))

    def _reducescatter(self, buffer: Array, counts: Sequence[int], op: ReduceOp) -> Array:
        # Gloo's own takes equal parts only, and not every dtype.
        size = counts[self.rank] * buffer.itemsize
        parts = self._alltoall(buffer.view(np.uint8), [n * buffer.itemsize for n in counts], [size] * self.size)
        result: Array = UFUNCS[op].reduce(parts.view(buffer.dtype).reshape(self.size, -1), axis=0, dtype=buffer.dtype)
        return result

    def _alltoall(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        received = np.empty(sum(receive_counts), np.uint8)
        sent = _tensor(send[: sum(send_counts)])
        with translated("alltoall"):
            _wait(self._group.alltoall_base(torch.from_numpy(received), sent, list(receive_counts), list(send_counts)))
        return received

    def _split(self, ranks: Sequence[int]) -> TorchCommunicator | None:
        store = self.branch()
        if self.rank not in ranks:
            return None
        members = [self.ranks[rank] for rank in ranks]
        rank = list(ranks).index(self.rank)
        return TorchCommunicator(store, rank, members, self.address, self._queue, self._seconds)

    def close(self) -> None:
        """Closes the connections; all members must do so."""
        del self._group


def start(topology: Topology, comm: Sequence[int] | None = None) -> tuple[TorchCommunicator, Topology]:
    """Connects all ranks; their communicator, and the place of this one as the ranks' hosts tell it.

    Ranks of torchrun and ``TF_CONFIG`` meet where these say, those that MPI started where MPI's rank 0 says.

    Args:
        topology: what the launcher's environment says.
        comm: the ranks that take part; ``None`` for all.

    Raises:
        ConfigError: this rank does not take part.
        EngineUnavailable: the ranks do not say where they meet, or do not meet in time.
    """
    seconds = Config.from_environ(os.environ).start_timeout
    store: dist.Store = dist.HashStore()
    address = LOOPBACK
    if topology.size > 1 and topology.launcher in WITHOUT_MPI:
        store, address = store_at(_master(topology), topology.rank, seconds)
    elif topology.size > 1:
        from choros.comm.engines import mpi

        control, topology = mpi.start(topology, comm)
        comm = None
        store, address = store_over(control, seconds)
        control.close()
    # Each start has keys of its own: ranks may leave and join many times.
    store = dist.PrefixStore(f"choros {next(_starts)}", store)
    places = exchange_places(store, topology.rank, topology.size, address, seconds)
    address = _own_address(places, topology.rank)
    communicator = TorchCommunicator(store, topology.rank, range(topology.size), address, WorkQueue(), seconds)
    if comm is not None:
        communicator = communicator.only(comm)
        places = [places[rank] for rank in sorted(comm)]
    hosts = [place.host for place in places]
    return communicator, Topology.from_hosts(hosts, communicator.rank, launcher=topology.launcher)


def finalize() -> None:
    """Ends MPI where it was the control plane; call it once, when the process ends."""
    mpi = sys.modules.get("choros.comm.engines.mpi")
    if mpi is not None:
        mpi.finalize()


def _master(topology: Topology) -> Master:
    master = find_master(os.environ, topology.launcher)
    if master is None:
        raise EngineUnavailable(
            f"{topology.launcher} started {topology.size} ranks, but MASTER_ADDR and MASTER_PORT, where they meet, are "
            f"not set. Set both on every rank to an address of rank 0's host and a free port of it. Or: Start the "
            f"script with chorosrun -np {topology.size}, which needs neither."
        )
    return master


def _own_address(places: Sequence[Place], rank: int) -> str:
    chosen = choose_address(places, rank)
    if chosen is not None:
        return chosen
    others = (place.address for place in places if not is_loopback(place.address))
    return next(map(address_towards, others), LOOPBACK)


def _gloo_group(store: dist.Store, rank: int, size: int, address: str, seconds: float) -> Any:
    """Gloo's connections of the members, listening at ``address`` unless ``GLOO_SOCKET_IFNAME`` names interfaces."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = dist.ProcessGroupGloo._Options()
    with translated("connecting the ranks"):
        if interfaces:
            options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
        else:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=seconds)
        group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_FOREVER)
    return group


def _tensor(array: Array) -> torch.Tensor:
    """Shares memory with ``array`` unless it is read-only, which no tensor can be."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _wait(work: Any) -> None:
    """Waits for a collective of tensors in host memory; raises its error."""
    while not work.is_completed():
        with suppress(RuntimeError):
            work.wait(_NAP)
    work.wait()


def _gather(group: Any, send: torch.Tensor, received: torch.Tensor, counts: Sequence[int], rank: int) -> list[Any]:
    """Starts to concatenate the ranks' rows, ``counts[i]`` of rank ``i``, in ``received``."""
    if len(set(counts)) == 1:
        return [group._allgather_base(received, send)]
    parts = torch.split(received, list(counts))
    parts[rank].copy_(send)
    return [group.broadcast([part], _broadcast_options(root)) for root, part in enumerate(parts)]


def _allreduce_options(op: ReduceOp) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return options


def _broadcast_options(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return options


# ── device arrays ────────────────────────────────────────────────────────────────────────────────


@final
class DeviceGroup:
    """The members of a communicator, exchanging torch's tensors where they lie: on GPUs through NCCL.

    ::

        control plane (MPI, Gloo)            device (NCCL)
        same request on all ranks? ── yes ──► reduce; the current stream waits for it, the host does not

    Every method must be called by all members, in the same order. Calls that they do not make alike raise a
    ``MismatchError`` on all of them before data moves. Results are there for whatever the current CUDA stream runs
    next. On the CPU Gloo moves the tensors, and a call returns when they have arrived.

    Attributes:
        device: where tensors lie.

    Example:
        >>> from choros.comm.engines.local import LocalCommunicator
        >>> group = DeviceGroup(LocalCommunicator(), torch.device("cpu"))
        >>> tensor = torch.ones(2)
        >>> group.allreduce(tensor)
        >>> group.allgather(tensor)
        tensor([1., 1.])
        >>> group.close()
    """

    def __init__(self, control: Communicator, device: torch.device) -> None:
        """Connects the members' devices; all members must call it.

        Args:
            control: the members.
            device: this rank's, ``cuda`` or ``cpu``. Ranks on one card need NCCL 2.30; it is told to let them.

        Raises:
            EngineUnavailable: there is no engine for such devices.
            EngineError: the devices cannot be connected.
        """
        problem = None
        if device.type not in ("cuda", "cpu"):
            problem = EngineUnavailable(
                f"tensors on {device} cannot be moved where they lie: only those on cuda and on cpu can."
            )
        elif device.type == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            problem = EngineUnavailable(f"tensors on {device} need a GPU and a PyTorch that was built with NCCL.")
        with control.turn():
            control.agree(Request("connection of devices", device.type), problem=problem)
        self.device = torch.empty(0, device=device).device  # with its index
        self._control = control
        self._engine = "NCCL" if device.type == "cuda" else "Gloo"
        seconds = Config.from_environ(os.environ).start_timeout
        if isinstance(control, TorchCommunicator):
            store, address = control.branch(), control.address
        else:
            store, address = store_over(control, seconds)
        self._store = store  # NCCL asks it again when it ends
        if device.type == "cuda":
            self._group = self._nccl_group(store)
        else:
            places = exchange_places(store, control.rank, control.size, address, seconds)
            self._group = _gloo_group(store, control.rank, control.size, _own_address(places, control.rank), seconds)

    def _nccl_group(self, store: dist.Store) -> Any:
        card = str(torch.cuda.get_device_properties(self.device).uuid).encode()
        cards = self._control.allgather(np.frombuffer(card, np.uint8)[None], name="cards")
        if len(np.unique(cards, axis=0)) < self._control.size:
            os.environ.setdefault(_SHARE_CARDS, "1")  # read when NCCL connects its first ranks
            if _nccl_version()[:2] < _NCCL_SHARES_CARDS:
                raise EngineError(_shared_card())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        try:
            group = dist.ProcessGroupNCCL(store, self._control.rank, self._control.size, options)
            # NCCL connects ranks in their first collective: its errors belong here.
            group.allreduce([torch.zeros(1, device=self.device)], dist.AllreduceOptions()).wait()
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            text = str(error)
            raise EngineError(_shared_card() if "Duplicate GPU" in text else f"NCCL cannot connect: {text}") from error
        return group

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.AVERAGE, *, name: str = "") -> None:
        """Reduces ``tensor`` over all ranks, in place.

        Args:
            tensor: contiguous; the same shape and dtype on every rank. float16 and bfloat16 are summed as they are.
            op: how values are combined.
            name: shown in errors.

        Raises:
            MismatchError: ranks called it differently.
            ConfigError: the tensor cannot be reduced with ``op``, or lies elsewhere.
        """
        request = Request("device allreduce", f"op={op.value}, {_kind(tensor)}", name)
        with self._control.turn():
            self._control.agree(request, problem=self._problem(tensor, op))
            self.reduce_in_place(tensor, op)

    def reduce_in_place(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """``allreduce``, unchecked: call it inside a ``turn`` of the control plane after ``agree``."""
        values = tensor.detach()
        if values.dtype == torch.bool:
            values, op = values.view(torch.uint8), working_op(np.dtype(np.bool_), op)
        summed = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
        with translated("allreduce", self._engine):
            self._finish(self._group.allreduce([values], _allreduce_options(summed)))
        if op is ReduceOp.AVERAGE:
            values.div_(self._control.size, rounding_mode=None if values.is_floating_point() else "trunc")

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, name: str = "") -> None:
        """Overwrites ``tensor`` with that of the member ``root``.

        Args:
            tensor: contiguous; the same shape and dtype on every rank.
            root: a rank of the control plane.
            name: shown in errors.
        """
        problem = self._problem(tensor)
        if not 0 <= root < self._control.size:
            problem = ConfigError(f"broadcast: root={root} is not one of the {self._control.size} ranks.")
        with self._control.turn():
            self._control.agree(Request("device broadcast", f"root={root}, {_kind(tensor)}", name), problem=problem)
            with translated("broadcast", self._engine):
                self._finish(self._group.broadcast([_bytes(tensor)], _broadcast_options(root)))

    def allgather(self, tensor: torch.Tensor, *, name: str = "") -> torch.Tensor:
        """Concatenates the ranks' tensors along the first dimension, in the order of the ranks.

        Args:
            tensor: contiguous; the first dimension may differ between ranks; a scalar counts as one row.
            name: shown in errors.
        """
        rows = torch.atleast_1d(tensor.detach())
        request = Request("device allgather", f"dtype={rows.dtype}, shape=(any, {list(rows.shape[1:])})", name)
        with self._control.turn():
            extents = self._control.agree(request, extent=len(rows), problem=self._problem(rows))
            received = rows.new_empty((sum(extents), *rows.shape[1:]))
            row_bytes = rows.element_size() * int(np.prod(rows.shape[1:], dtype=np.int64))
            counts = [extent * row_bytes for extent in extents]
            with translated("allgather", self._engine):
                for work in _gather(self._group, _bytes(rows), _bytes(received), counts, self._control.rank):
                    self._finish(work)
        return received

    def close(self) -> None:
        """Gives back what the group holds; all members must do so, and nothing may be called after it."""
        if self._engine == "NCCL":
            self._group.shutdown()
        del self._group, self._store

    def _finish(self, work: Any) -> None:
        if self._engine == "NCCL":
            work.wait()  # orders the current stream behind it
        else:
            _wait(work)

    def _problem(self, tensor: torch.Tensor, op: ReduceOp | None = None) -> ConfigError | None:
        if tensor.device != self.device:
            return ConfigError(f"a tensor on {tensor.device} was given to a group of tensors on {self.device}.")
        if not tensor.is_contiguous():
            return ConfigError("a tensor that is not contiguous was given: call contiguous() first.")
        try:
            check_dtype(np.dtype(str(tensor.dtype).removeprefix("torch.")), op)
        except (ConfigError, TypeError) as error:
            return error if isinstance(error, ConfigError) else ConfigError(f"{tensor.dtype} cannot be communicated.")
        return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _kind(tensor: torch.Tensor) -> str:
    return f"dtype={tensor.dtype}, shape={tuple(tensor.shape)}"


def _nccl_version() -> tuple[int, ...]:
    """That of the library which is loaded: ``torch.cuda.nccl.version()`` is that which PyTorch was built with."""
    return tuple(dist.ProcessGroupNCCL.get_runtime_nccl_version())


def _shared_card() -> str:
    needed, found = (".".join(map(str, version)) for version in (_NCCL_SHARES_CARDS, _nccl_version()))
    setting = os.environ.get(_SHARE_CARDS, "not set")
    return (
        f"several ranks have the same GPU, which NCCL lets them from version {needed} on (this is {found}) with "
        f"{_SHARE_CARDS}=1 (here {setting}). Start one rank for each GPU, as chorosrun without -np does, or install a "
        "newer NCCL."
    )
