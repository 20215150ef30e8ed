"""Collectives on torch's tensors without staging, over any connection of the members' devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch  # noqa: TID253  (imported where tensors of torch are at hand)

from choros.comm.communicator import Communicator, row_counts
from choros.comm.devices import Device, DeviceLink
from choros.comm.reduction import Reduction, check_dtype, working_op
from choros.comm.request import Request
from choros.errors import ConfigError
from choros.topology import shard_range

__all__ = ["DeviceGroup", "as_tensor"]


def as_tensor(array: Any) -> torch.Tensor:
    """Returns a tensor of torch that shares the memory of ``array``, which has DLPack's protocol."""
    if isinstance(array, torch.Tensor):
        return array
    try:
        tensor = torch.from_dlpack(array)
    except RuntimeError:  # TensorFlow's takes no stream: it waits until the values have arrived
        tensor = torch.from_dlpack(array.__dlpack__())
    if not (tensor.is_cuda and tensor.is_contiguous() and tensor.numel()):
        return tensor
    # TensorFlow numbers the GPUs that it sees; torch finds out by the address.
    return torch.as_tensor(_Memory(tensor)).view(tensor.dtype).view(tensor.shape)


@final
class _Memory:
    """The bytes of a tensor on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


@final
class DeviceGroup:
    """The members of a communicator with their devices; the methods are those of ``DeviceCollectives``.

    Attributes:
        device: the device of the tensors.

    Example:
        >>> from choros.comm.engines import torch_devices
        >>> from choros.comm.engines.local import LocalCommunicator
        >>> alone, cpu = LocalCommunicator(), Device("cpu")
        >>> group = DeviceGroup(alone, torch_devices.connect(alone, cpu), cpu)
        >>> tensor = torch.ones(2)
        >>> group.allreduce(tensor)
        >>> group.allgather(tensor)
        tensor([1., 1.])
        >>> group.close()
    """

    def __init__(self, control: Communicator, link: DeviceLink, device: Device) -> None:
        """Creates a group.

        Args:
            control: the members.
            link: the connection of their devices.
            device: this rank's.
        """
        self.device = torch.device(device.type) if device.type == "cpu" else torch.device(device.type, device.index)
        self._control = control
        self._link = link

    def allreduce(self, tensor: torch.Tensor, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        _check_writable(tensor)
        request = Request("device allreduce", f"op={op.value}, {_kind(tensor)}", name)
        with self._control.exclusive():
            self._control.agree(request, problem=self._problem(tensor, op))
            values = tensor.detach()
            if values.dtype == torch.bool:
                values, op = values.view(torch.uint8), working_op(np.dtype(np.bool_), op)
            self._link.allreduce(values.reshape(-1), Reduction.SUM if op is Reduction.AVERAGE else op)
        if op is Reduction.AVERAGE:
            values.div_(self._control.size, rounding_mode=None if values.is_floating_point() else "trunc")

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        _check_writable(tensor)
        problem = self._problem(tensor)
        if not 0 <= root < self._control.size:
            problem = ConfigError(f"broadcast: root={root} is not one of the {self._control.size} ranks.")
        with self._control.exclusive():
            self._control.agree(Request("device broadcast", f"root={root}, {_kind(tensor)}", name), problem=problem)
            self._link.broadcast(_bytes(tensor), root)

    def allgather(self, tensor: Any, *, name: str = "") -> torch.Tensor:
        """See ``DeviceCollectives``."""
        rows = torch.atleast_1d(as_tensor(tensor).detach())
        request = Request("device allgather", f"dtype={rows.dtype}, shape=(any, {list(rows.shape[1:])})", name)
        with self._control.exclusive():
            lengths = self._control.agree(request, value=len(rows), problem=self._problem(rows))
            received = rows.new_empty((sum(lengths), *rows.shape[1:]))
            row_bytes = _row_bytes(rows)
            self._link.allgatherv(_bytes(rows), _bytes(received), [length * row_bytes for length in lengths])
        return received

    def reducescatter(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> torch.Tensor:
        """See ``DeviceCollectives``."""
        rows = as_tensor(tensor).detach()
        problem = self._problem(rows, op)
        if rows.ndim == 0:
            problem = ConfigError("reducescatter: a scalar has no rows to scatter; give it at least one dimension.")
        request = Request("device reducescatter", f"op={op.value}, {_kind(rows)}", name)
        with self._control.exclusive():
            self._control.agree(request, problem=problem)
            size, rank = self._control.size, self._control.rank
            shares = [shard_range(len(rows), other, size) for other in range(size)]
            counts = [end - start for start, end in shares]
            parts = self._alltoallv(rows, counts, [counts[rank]] * size).view(size, counts[rank], *rows.shape[1:])
        return _reduce_parts(parts, op)

    def alltoall(
        self, tensor: Any, splits: Sequence[int] | None = None, *, name: str = ""
    ) -> tuple[torch.Tensor, list[int]]:
        """See ``DeviceCollectives``."""
        rows = as_tensor(tensor).detach()
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
        row_bytes = _row_bytes(rows)
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        counts = ([count * row_bytes for count in counts] for counts in (send, receive))
        self._link.alltoallv(_bytes(rows[: sum(send)]), _bytes(received), *counts)
        return received

    def close(self) -> None:
        """Closes the connection; all members must call it, and no method may be called after it."""
        self._link.close()

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


def _check_writable(array: Any) -> None:
    if not isinstance(array, torch.Tensor):
        raise ConfigError(
            f"{type(array).__name__}: only torch's tensors can be overwritten in place; copy it with "
            "torch.from_dlpack(array).clone() first."
        )


def _row_bytes(rows: torch.Tensor) -> int:
    return int(rows.element_size() * math.prod(rows.shape[1:]))


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
