"""The devices of a process, the connections between them, and collectives on their tensors that bypass the host."""

from __future__ import annotations

import ctypes
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from choros.comm.members import Members
from choros.comm.reduction import Reduction, dtype_problem, working_op
from choros.comm.request import Request
from choros.comm.transfers import row_counts
from choros.errors import ChorosError, ConfigError, EngineError, EngineUnavailable
from choros.frameworks import is_installed
from choros.settings import Config
from choros.topology import shard_range

if TYPE_CHECKING:
    import torch

#: DLPack's numbers of devices, by PyTorch's names. Pinned memory is the host's, and PyTorch calls AMD's GPUs cuda.
_TYPES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "cuda"}
#: The first version of NCCL in which ranks can share a card, if it is configured to.
_SHARES_CARDS = (2, 30)
_SHARE_CARDS = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True)
class Device:
    """A device of this process: its type, such as ``cuda`` or ``cpu``, and its number, as CUDA numbers it; where
    gradients are reduced, also the framework of the tensors there.
    """

    type: str
    index: int = 0
    framework: str = ""

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


def device_of(array: Any) -> Device:
    """Returns the device of a tensor of torch, or of any array with DLPack's protocol.

    >>> import numpy as np
    >>> device_of(np.ones(2))
    Device(type='cpu', index=0, framework='')
    """
    own: Any = getattr(array, "device", None)
    if hasattr(own, "index") and hasattr(own, "type"):  # torch's: DLPack does not know all of its devices
        return Device(own.type, own.index or 0)
    number, index = array.__dlpack_device__()
    return Device(_TYPES.get(int(number), f"device type {int(number)}"), index)


class DeviceLink(ABC):
    """The connection of one device of each member: collectives on buffers there, unchecked.

    The members call each method together, in the same order, inside ``exclusive()`` of the control plane. A *buffer* is
    one-dimensional and contiguous, and is overwritten: a tensor of torch, or an object with DLPack's protocol, whose
    device is numbered as CUDA numbers it. How NCCL's work is ordered with that of the framework::

        PyTorch: the host does not wait

            PyTorch's current stream   backward ─ pack ─ NCCL ─ unpack ─ update           nccl4py runs in this stream

            PyTorch's current stream   backward ─ pack ─┐          ┌─ unpack ─ update     torch.distributed has one of
            its stream of NCCL                          └─► NCCL ─►┘                      its own; events order the two

        TensorFlow: the host waits twice, as TensorFlow's __dlpack__ takes no stream and tensors do not name theirs

            TensorFlow's stream        backward ─ pack ─┐                          ┌─ unpack ─ update
            the host                                    └─ __dlpack__ waits ─┐  ┌─►┘
            a stream of the link                                             └─► NCCL, waits
    """

    @abstractmethod
    def allreduce(self, buffer: Any, op: Reduction) -> None:
        """Reduces ``buffer`` over all ranks; ``op`` is not ``AVERAGE``."""

    @abstractmethod
    def broadcast(self, tensor: Any, root: int) -> None:
        """Overwrites ``tensor``, bytes of torch, with that of ``root``."""

    @abstractmethod
    def allgatherv(self, tensor: Any, received: Any, counts: Sequence[int]) -> None:
        """Concatenates the ranks' ``tensor`` in ``received``, both bytes of torch, ``counts[i]`` of rank ``i``."""

    @abstractmethod
    def alltoallv(self, tensor: Any, received: Any, send: Sequence[int], receive: Sequence[int]) -> None:
        """Sends ``send[i]`` bytes of ``tensor`` to rank ``i``; ``received`` has ``receive[i]`` of each, in order."""

    @abstractmethod
    def close(self) -> None:
        """Releases the connection; all members must call it, and no method may be called after it."""


def agree_to_connect(control: Members, device: Device, library: str, problem: ChorosError | None) -> None:
    """Raises an error on all members if one of them cannot connect ``device``, or would by another library."""
    control.agree(Request("connection of devices", f"{device.type} through {library}"), problem=problem)


def connection_error(version: Sequence[int], error: Exception | None = None) -> EngineError:
    """The error of ranks that cannot connect: because they share a card, or for NCCL's reason ``error``."""
    if error is not None and "Duplicate GPU" not in str(error):
        return EngineError(f"NCCL cannot connect: {error}")
    needed, found = (".".join(map(str, each)) for each in (_SHARES_CARDS, version))
    setting = os.environ.get(_SHARE_CARDS, "not set")
    return EngineError(
        f"several ranks have the same GPU, which NCCL lets them from version {needed} on (this is {found}) with "
        f"{_SHARE_CARDS}=1 (here {setting}). Start one rank for each GPU, as chorosrun without -np does, or "
        "install a newer NCCL."
    )


def share_cards(control: Members, card: str, version: Sequence[int]) -> None:
    """Configures NCCL if ranks share a card; all call it before NCCL connects, with unique names of equal length."""
    name = np.frombuffer(card.encode(), np.uint8)
    with control.exclusive():
        every = control.gather_bytes(name, control.agree(Request("cards of the ranks"), value=len(name)))
    if len(np.unique(every.reshape(control.size, -1), axis=0)) < control.size:
        os.environ.setdefault(_SHARE_CARDS, "1")  # read when NCCL connects its first ranks
        if tuple(version[:2]) < _SHARES_CARDS:
            raise connection_error(version)


@final
class DeviceCollectives:
    """Collectives on tensors that stay on their device, connected at its first use; all members call them in the same
    order, each with any object of DLPack's protocol (one to overwrite: torch's; so are results, for operations
    enqueued later on the current stream). Calls that differ raise a ``MismatchError`` on all before data moves::

        control plane (MPI, Gloo)            device (NCCL)
        same request on all ranks? ── yes ──► reduce; the framework's stream waits for it (DeviceLink)

    >>> import torch
    >>> from choros.comm.engines.local import LocalCommunicator
    >>> alone = LocalCommunicator()
    >>> from choros.comm.engines import torch_devices
    >>> devices = DeviceCollectives(alone, ["cpu"], lambda device: torch_devices.connect(alone, device))
    >>> tensor = torch.ones(2)
    >>> devices.allreduce(tensor)
    >>> devices.allgather(tensor)
    tensor([1., 1.])
    >>> devices.close()
    """

    def __init__(self, control: Members, kinds: Collection[str], connect: Callable[[Device], DeviceLink]) -> None:
        """Connects nothing yet; ``connect`` connects a device later, and all members call it together."""
        self._kinds = frozenset(kinds)
        self._control = control
        self._connect = connect
        self._links: dict[Device, DeviceLink] = {}

    def moves(self, kind: str) -> bool:
        """Whether tensors on devices of ``kind``, such as ``cuda``, are communicated without a copy to the host."""
        return kind in self._kinds

    def reduce_in_place(self, buffer: Any, op: Reduction) -> None:
        """``allreduce``, unchecked: in ``exclusive()``, after ``agree``; needs no PyTorch; ``op`` not ``AVERAGE``."""
        self._link(buffer).allreduce(buffer, op)

    def allreduce(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> None:
        """Reduces a contiguous ``tensor`` in place; float16 and bfloat16 are summed in their own precision."""
        import torch

        values = as_tensor(tensor)
        link = self._link(values)
        request = Request("device allreduce", f"op={op.title}, {_kind(values)}", name)
        with self._control.exclusive():
            self._control.agree(request, problem=_unwritable(tensor, values) or _problem(values, op))
            values = values.detach()
            if values.dtype == torch.bool:
                values, op = values.view(torch.uint8), working_op(np.dtype(np.bool_), op)
            link.allreduce(values.reshape(-1), Reduction.SUM if op is Reduction.AVERAGE else op)
        if op is Reduction.AVERAGE:
            values.div_(self._control.size, rounding_mode=None if values.is_floating_point() else "trunc")

    def broadcast(self, tensor: Any, root: int = 0, *, name: str = "") -> None:
        """Overwrites ``tensor``, which is contiguous, with that of the member ``root``."""
        values = as_tensor(tensor)
        link = self._link(values)
        problem = _unwritable(tensor, values) or _problem(values)
        if not 0 <= root < self._control.size:
            problem = ConfigError(f"broadcast: root={root} is not one of the {self._control.size} ranks.")
        with self._control.exclusive():
            self._control.agree(Request("device broadcast", f"root={root}, {_kind(values)}", name), problem=problem)
            link.broadcast(_bytes(values), root)

    def allgather(self, tensor: Any, *, name: str = "") -> torch.Tensor:
        """Concatenates contiguous tensors along the first dimension, by rank; it may differ, a scalar is one row."""
        rows = as_tensor(tensor).detach()
        rows = rows if rows.ndim else rows.reshape(1)
        link = self._link(rows)
        with self._control.exclusive():
            request = _rows_request("device allgather", rows, name)
            lengths = self._control.agree(request, value=len(rows), problem=_problem(rows))
            received = rows.new_empty((sum(lengths), *rows.shape[1:]))
            row_bytes = _row_bytes(rows)
            link.allgatherv(_bytes(rows), _bytes(received), [length * row_bytes for length in lengths])
        return received

    def reducescatter(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> torch.Tensor:
        """Reduces a contiguous ``tensor`` and returns this rank's rows of the result, as by ``shard_range``."""
        rows = as_tensor(tensor).detach()
        link = self._link(rows)
        problem = _problem(rows, op)
        if rows.ndim == 0:
            problem = ConfigError("reducescatter: a scalar has no rows to scatter; give it at least one dimension.")
        request = Request("device reducescatter", f"op={op.title}, {_kind(rows)}", name)
        with self._control.exclusive():
            self._control.agree(request, problem=problem)
            size, rank = self._control.size, self._control.rank
            shares = [shard_range(len(rows), other, size) for other in range(size)]
            counts = [end - start for start, end in shares]
            parts = _alltoallv(link, rows, counts, [counts[rank]] * size).view(size, counts[rank], *rows.shape[1:])
        return _reduce_parts(parts, op)

    def alltoall(
        self, tensor: Any, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[torch.Tensor, list[int]]:
        """Sends rows to every rank (``None``: equally many); returns those received by sender, and their numbers."""
        rows = as_tensor(tensor).detach()
        link = self._link(rows)
        with self._control.exclusive():
            size = self._control.size
            counts, problem = row_counts(rows.shape, splits, size)
            self._control.agree(_rows_request("device alltoall", rows, name), problem=problem or _problem(rows))
            eights = [counts.itemsize] * size
            received = self._control.alltoallv_bytes(counts.view(np.uint8), eights, eights).view(np.int64).tolist()
            return _alltoallv(link, rows, counts.tolist(), received), received

    def close(self) -> None:
        """Closes the connections; all members must call it."""
        while self._links:
            self._links.popitem()[1].close()

    def _link(self, array: Any) -> DeviceLink:
        device = device_of(array)
        if device not in self._links:
            self._links[device] = self._connect(device)
        return self._links[device]


def as_tensor(array: Any) -> torch.Tensor:
    """Returns a tensor of torch that shares the memory of ``array``, which has DLPack's protocol."""
    try:
        import torch
    except ImportError as error:
        raise EngineUnavailable(
            "collectives on device tensors need PyTorch, whose tensors their results are: pip install torch, or "
            "call the communicator's own, which pass host memory."
        ) from error
    if isinstance(array, torch.Tensor):
        return array
    try:
        tensor = torch.from_dlpack(array)
    except RuntimeError:  # TensorFlow's takes no stream: it waits until the values have arrived
        tensor = torch.from_dlpack(array.__dlpack__())
    if not (tensor.is_cuda and tensor.is_contiguous() and tensor.numel()):
        return tensor
    # TensorFlow numbers the GPUs that it sees; torch finds out by the address.
    interface = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2}
    memory = SimpleNamespace(owner=tensor, __cuda_array_interface__=interface)
    return torch.as_tensor(memory).view(tensor.dtype).view(tensor.shape)


def _unwritable(array: Any, tensor: torch.Tensor) -> ConfigError | None:
    if tensor is array:
        return None
    return ConfigError(
        f"{type(array).__name__}: only torch's tensors can be overwritten in place; copy it with "
        "torch.from_dlpack(array).clone() first."
    )


def _problem(tensor: torch.Tensor, op: Reduction | None = None) -> ConfigError | None:
    if not tensor.is_contiguous():
        return ConfigError("a tensor that is not contiguous was given: call contiguous() first.")
    try:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:
        return ConfigError(f"{tensor.dtype} cannot be communicated.")
    return dtype_problem(dtype, op)


def _alltoallv(link: DeviceLink, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
    """Sends ``send[i]`` rows to rank ``i``, and concatenates ``receive[i]`` rows from each."""
    row_bytes = _row_bytes(rows)
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    counts = ([count * row_bytes for count in counts] for counts in (send, receive))
    link.alltoallv(_bytes(rows[: sum(send)]), _bytes(received), *counts)
    return received


def _row_bytes(rows: torch.Tensor) -> int:
    return int(rows.element_size() * math.prod(rows.shape[1:]))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def _reduce_parts(parts: torch.Tensor, op: Reduction) -> torch.Tensor:
    import torch

    if parts.dtype == torch.bool:
        op = working_op(np.dtype(np.bool_), op)
        return parts.any(0) if op is Reduction.MAX else parts.all(0)
    if op in (Reduction.MIN, Reduction.MAX):
        return parts.amin(0) if op is Reduction.MIN else parts.amax(0)
    if op is Reduction.PRODUCT:
        return parts.prod(0, dtype=parts.dtype)
    total = parts.sum(0, dtype=parts.dtype)
    if op is Reduction.AVERAGE:
        total.div_(len(parts), rounding_mode=None if total.is_floating_point() else "trunc")
    return total


def _kind(tensor: torch.Tensor) -> str:
    return f"dtype={tensor.dtype}, shape={tuple(tensor.shape)}"


def _rows_request(collective: str, rows: torch.Tensor, name: str) -> Request:
    return Request(collective, f"dtype={rows.dtype}, shape=(any, {list(rows.shape[1:])})", name)


def nccl4py_problem() -> str:
    """Why nccl4py cannot be used here, as a clause, or nothing. CUDA stays as it is: the script may choose devices."""
    if not is_installed("nccl"):
        return "nccl4py is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no driver of NVIDIA's"
    try:
        from nccl import core
    except ImportError as error:
        return f"nccl4py cannot be imported ({error})"
    return "" if core.get_version().libnccl is not None else "nccl4py does not find NCCL's library, libnccl.so.2"


def select_devices(
    engine: str,
    size: int,
    config: Config,
    installed: Callable[[str], bool] = is_installed,
    nccl4py_problem: Callable[[], str] = nccl4py_problem,
) -> tuple[str | None, tuple[str, ...], str]:
    """Selects the collectives on devices between ``size`` ranks whose host arrays ``engine`` moves: the module that
    connects devices, or ``None`` if tensors go through the host; the kinds of devices; and why.

    >>> select_devices("mpi", 1, Config.from_environ({}))
    (None, (), 'one rank: nothing to move')
    """
    requested = config.devices
    if size == 1:
        return (None, (), "one rank: nothing to move")
    if requested == "host":
        return (None, (), "copied through host memory: CHOROS_DEVICES=host")
    if engine == "threads":
        return (None, (), "copied through host memory, which threads share")
    if engine not in ("mpi", "torch"):
        return (None, (), "copied through host memory: this engine has no collectives on devices")
    if engine == "torch" and requested in ("auto", "torch"):
        moves = "which connects these ranks, moves those on GPUs (NCCL, RCCL) and in host memory (Gloo)"
        return ("torch_devices", ("cpu", "cuda"), f"torch.distributed, {moves}")
    problem = "" if requested == "torch" else nccl4py_problem()
    if requested != "torch" and not problem:
        moves = "NCCL moves those on GPUs, by nccl4py, of TensorFlow and of PyTorch; the engine moves host memory"
        return ("nccl4py_devices", ("cuda",), moves)
    if requested != "nccl4py" and installed("torch"):
        why = " (NCCL, RCCL), because " + problem if problem else ": CHOROS_DEVICES=torch"
        return ("torch_devices", ("cuda",), f"torch.distributed moves those on GPUs{why}")
    if requested == "auto":
        reason = f"copied through host memory, because {problem}, and PyTorch is not installed either"
        return (None, (), reason)
    raise EngineUnavailable(
        f"CHOROS_DEVICES={requested} cannot be used, because {problem or 'PyTorch is not installed'}. Install what is "
        "missing (pip install 'choros[cuda]', or torch), or unset it: choros then selects what can be used."
    )
