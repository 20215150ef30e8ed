"""Collectives on torch's tensors without staging: on GPUs through NCCL, on the CPU through Gloo.

Any communicator can be the control plane. ``DeviceGroup`` connects the ranks' devices of one kind; ``TorchDevices``
creates the group of a device at its first use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import Any, final

import numpy as np
import torch  # noqa: TID253  (imported where tensors of torch are at hand)
import torch.distributed as dist  # noqa: TID253

from choros.comm.communicator import Communicator, row_counts
from choros.comm.devices import DeviceCollectives
from choros.comm.engines.nccl import nccl_group
from choros.comm.engines.process_groups import (
    allreduce_options,
    broadcast_options,
    gloo_group,
    own_address,
    start_allgather,
    wait_on_host,
)
from choros.comm.engines.torch import TorchCommunicator
from choros.comm.reduction import Reduction, check_dtype, working_op
from choros.comm.request import Request
from choros.comm.store import exchange_locations, store_over, translated
from choros.config import Config
from choros.errors import ConfigError, EngineUnavailable
from choros.topology import shard_range

__all__ = ["DeviceGroup", "TorchDevices", "connect"]


def connect(control: Communicator, kinds: Collection[str]) -> TorchDevices:
    """Returns the collectives of the members of ``control`` on devices of ``kinds``."""
    return TorchDevices(control, kinds)


@final
class TorchDevices(DeviceCollectives):
    """Collectives on tensors of torch, and on others through DLPack; a device is connected at its first use."""

    def __init__(self, control: Communicator, kinds: Collection[str]) -> None:
        super().__init__(kinds)
        self._control = control
        self._groups: dict[torch.device, DeviceGroup] = {}

    def allreduce(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        self._group_of(_writable(tensor)).allreduce(tensor, op, name=name)

    def reduce_in_place(self, tensor: Any, op: Reduction) -> None:
        """See ``DeviceCollectives``."""
        self._group_of(tensor).reduce_in_place(tensor, op)

    def broadcast(self, tensor: Any, root: int = 0, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        self._group_of(_writable(tensor)).broadcast(tensor, root, name=name)

    def allgather(self, tensor: Any, *, name: str = "") -> torch.Tensor:
        """See ``DeviceCollectives``."""
        rows = _tensor(tensor)
        return self._group_of(rows).allgather(rows, name=name)

    def reducescatter(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> torch.Tensor:
        """See ``DeviceCollectives``."""
        rows = _tensor(tensor)
        return self._group_of(rows).reducescatter(rows, op, name=name)

    def alltoall(
        self, tensor: Any, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[torch.Tensor, list[int]]:
        """See ``DeviceCollectives``."""
        rows = _tensor(tensor)
        return self._group_of(rows).alltoall(rows, splits, name=name)

    def close(self) -> None:
        """See ``DeviceCollectives``."""
        while self._groups:
            self._groups.popitem()[1].close()

    def _group_of(self, tensor: torch.Tensor) -> DeviceGroup:
        if tensor.device not in self._groups:
            self._groups[tensor.device] = DeviceGroup(self._control, tensor.device)
        return self._groups[tensor.device]


def _tensor(array: Any) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)


def _writable(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    raise ConfigError(
        f"{type(array).__name__}: only torch's tensors can be overwritten in place; copy it with "
        "torch.from_dlpack(array).clone() first."
    )


@final
class DeviceGroup:
    """The members of a communicator with their devices: tensors are sent through NCCL on GPUs, Gloo on the CPU.

    The methods are those of ``DeviceCollectives``, for tensors on one device. On the CPU Gloo moves the tensors, and a
    call returns when they have arrived.

    Attributes:
        device: the device of the tensors.

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
            device: this rank's, ``cuda`` or ``cpu``. Ranks on one card need NCCL 2.30; NCCL is configured to let them.

        Raises:
            EngineUnavailable: there is no engine for such devices.
            EngineError: the devices cannot be connected.
        """
        problem = None
        if device.type not in ("cuda", "cpu"):
            problem = EngineUnavailable(
                f"tensors on {device} cannot be communicated without a copy: only those on cuda and on cpu can."
            )
        elif device.type == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            problem = EngineUnavailable(f"tensors on {device} need a GPU and a PyTorch that was built with NCCL.")
        with control.exclusive():
            control.agree(Request("connection of devices", device.type), problem=problem)
        self.device = torch.empty(0, device=device).device  # with its index
        self._control = control
        self._engine = "NCCL" if device.type == "cuda" else "Gloo"
        seconds = Config.from_environ(os.environ).start_timeout
        if isinstance(control, TorchCommunicator):
            store, address = control.branch(), control.address
        else:
            store, _, address = store_over(control, seconds)
        self._store = store  # kept alive: NCCL uses it again when it ends
        if device.type == "cuda":
            self._group = nccl_group(store, control, self.device)
        else:
            locations = exchange_locations(store, control.rank, control.size, address, seconds)
            self._group = gloo_group(store, control.rank, control.size, own_address(locations, control.rank), seconds)

    def allreduce(self, tensor: torch.Tensor, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        request = Request("device allreduce", f"op={op.value}, {_kind(tensor)}", name)
        with self._control.exclusive():
            self._control.agree(request, problem=self._problem(tensor, op))
            self.reduce_in_place(tensor, op)

    def reduce_in_place(self, tensor: torch.Tensor, op: Reduction) -> None:
        """``allreduce``, unchecked: call it inside ``exclusive()`` of the control plane after ``agree``."""
        values = tensor.detach()
        if values.dtype == torch.bool:
            values, op = values.view(torch.uint8), working_op(np.dtype(np.bool_), op)
        summed = Reduction.SUM if op is Reduction.AVERAGE else op
        with translated("allreduce", self._engine):
            self._finish(self._group.allreduce([values], allreduce_options(summed)))
        if op is Reduction.AVERAGE:
            values.div_(self._control.size, rounding_mode=None if values.is_floating_point() else "trunc")

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        problem = self._problem(tensor)
        if not 0 <= root < self._control.size:
            problem = ConfigError(f"broadcast: root={root} is not one of the {self._control.size} ranks.")
        with self._control.exclusive():
            self._control.agree(Request("device broadcast", f"root={root}, {_kind(tensor)}", name), problem=problem)
            with translated("broadcast", self._engine):
                self._finish(self._group.broadcast([_bytes(tensor)], broadcast_options(root)))

    def allgather(self, tensor: torch.Tensor, *, name: str = "") -> torch.Tensor:
        """See ``DeviceCollectives``."""
        rows = torch.atleast_1d(tensor.detach())
        request = Request("device allgather", f"dtype={rows.dtype}, shape=(any, {list(rows.shape[1:])})", name)
        with self._control.exclusive():
            lengths = self._control.agree(request, value=len(rows), problem=self._problem(rows))
            received = rows.new_empty((sum(lengths), *rows.shape[1:]))
            row_bytes = rows.element_size() * int(np.prod(rows.shape[1:], dtype=np.int64))
            counts = [length * row_bytes for length in lengths]
            with translated("allgather", self._engine):
                for work in start_allgather(self._group, _bytes(rows), _bytes(received), counts, self._control.rank):
                    self._finish(work)
        return received

    def reducescatter(self, tensor: torch.Tensor, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> torch.Tensor:
        """See ``DeviceCollectives``."""
        problem = self._problem(tensor, op)
        if tensor.ndim == 0:
            problem = ConfigError("reducescatter: a scalar has no rows to scatter; give it at least one dimension.")
        request = Request("device reducescatter", f"op={op.value}, {_kind(tensor)}", name)
        with self._control.exclusive():
            self._control.agree(request, problem=problem)
            size, rank = self._control.size, self._control.rank
            rows = tensor.detach()
            shares = [shard_range(len(rows), other, size) for other in range(size)]
            counts = [end - start for start, end in shares]
            parts = self._alltoallv(rows, counts, [counts[rank]] * size).view(size, counts[rank], *rows.shape[1:])
        return _reduce_parts(parts, op)

    def alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[torch.Tensor, list[int]]:
        """See ``DeviceCollectives``."""
        rows = tensor.detach()
        request = Request("device alltoall", f"dtype={rows.dtype}, shape=(any, {list(rows.shape[1:])})", name)
        with self._control.exclusive():
            size = self._control.size
            counts, problem = row_counts(rows.shape, splits, size)
            self._control.agree(request, problem=problem or self._problem(rows))
            eights = [counts.itemsize] * size
            received = self._control.alltoallv_bytes(counts.view(np.uint8), eights, eights).view(np.int64).tolist()
            return self._alltoallv(rows, counts.tolist(), received), received

    def _alltoallv(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Sends ``send[i]`` rows to rank ``i``, and concatenates ``receive[i]`` rows from each."""
        row_bytes = rows.element_size() * math.prod(rows.shape[1:])
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        splits = ([count * row_bytes for count in counts] for counts in (receive, send))
        with translated("alltoall", self._engine):
            self._finish(self._group.alltoall_base(_bytes(received), _bytes(rows[: sum(send)]), *splits))
        return received

    def close(self) -> None:
        """Releases the group's resources; all members must call it, and no method may be called after it."""
        if self._engine == "NCCL":
            self._group.shutdown()
        del self._group, self._store

    def _finish(self, work: Any) -> None:
        if self._engine == "NCCL":
            work.wait()  # orders the current stream behind it
        else:
            wait_on_host(work)

    def _problem(self, tensor: torch.Tensor, op: Reduction | None = None) -> ConfigError | None:
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


def _reduce_parts(parts: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Reduces the ranks' ``parts``, which are stacked along the first dimension."""
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
