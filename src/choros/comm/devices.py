"""Collectives on device tensors, without copies to the host, which some engines provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

from choros.comm.reduction import Reduction

__all__ = ["Device", "DeviceCollectives", "DeviceLink", "device_of"]

#: DLPack's numbers of devices, by PyTorch's names. Pinned memory is the host's, and PyTorch calls AMD's GPUs cuda.
_TYPES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "cuda"}


@dataclass(frozen=True)
class Device:
    """A device of this process.

    Attributes:
        type: such as ``cuda`` or ``cpu``.
        index: its number, as CUDA numbers it.
    """

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


def device_of(array: Any) -> Device:
    """Returns the device of a tensor of torch, or of any array with DLPack's protocol.

    Example:
        >>> import numpy as np
        >>> device_of(np.ones(2))
        Device(type='cpu', index=0)
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


class DeviceCollectives(ABC):
    """The collectives of a communicator's members on tensors that stay on their device.

    ::

        control plane (MPI, Gloo)            device (NCCL)
        same request on all ranks? ── yes ──► reduce; the framework's stream waits for it (DeviceLink)

    Every method must be called by all members, in the same order, each with tensors on its own device, which is
    connected at its first use. Tensors are any objects with DLPack's protocol; results are torch's, and so is a tensor
    to overwrite, as other frameworks' arrays are immutable. Calls that are not identical raise a ``MismatchError`` on
    all members before data moves. Results are available to operations enqueued later on the device's current stream.

    Attributes:
        kinds: the supported devices, such as ``cuda``.
    """

    def __init__(self, kinds: Collection[str]) -> None:
        self.kinds = frozenset(kinds)

    @final
    def moves(self, kind: str) -> bool:
        """Whether tensors on devices of ``kind``, such as ``cuda``, are communicated without a copy to the host."""
        return kind in self.kinds

    @abstractmethod
    def allreduce(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> None:
        """Reduces ``tensor`` over all ranks, in place.

        Args:
            tensor: contiguous; the same shape and dtype on every rank. float16 and bfloat16 are summed
                in their own precision.
            op: the reduction.
            name: shown in errors.

        Raises:
            MismatchError: ranks called it differently.
            ConfigError: the tensor cannot be reduced with ``op``, or cannot be overwritten.
        """

    @abstractmethod
    def reduce_in_place(self, buffer: Any, op: Reduction) -> None:
        """``allreduce``, unchecked: call it inside ``exclusive()`` of the communicator after ``agree``.

        Args:
            buffer: as ``DeviceLink`` takes it; nothing else refers to its memory. It needs no PyTorch.
            op: not ``AVERAGE``.
        """

    @abstractmethod
    def broadcast(self, tensor: Any, root: int = 0, *, name: str = "") -> None:
        """Overwrites ``tensor`` with that of the member ``root``.

        Args:
            tensor: contiguous; the same shape and dtype on every rank.
            root: a rank of the communicator.
            name: shown in errors.
        """

    @abstractmethod
    def allgather(self, tensor: Any, *, name: str = "") -> Any:
        """Concatenates the ranks' tensors along the first dimension, in the order of the ranks.

        Args:
            tensor: contiguous; the first dimension may differ between ranks; a scalar counts as one row.
            name: shown in errors.
        """

    @abstractmethod
    def reducescatter(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> Any:
        """Reduces ``tensor`` over all ranks and returns this rank's rows of the result, as by ``shard_range``.

        Args:
            tensor: contiguous, of at least one dimension; the same shape and dtype on every rank.
            op: the reduction.
            name: shown in errors.
        """

    @abstractmethod
    def alltoall(self, tensor: Any, splits: Sequence[int] | None = None, *, name: str = "") -> tuple[Any, list[int]]:
        """Sends rows of ``tensor`` to every rank and gathers the rows sent to this one.

        Args:
            tensor: contiguous; the first dimension may differ between ranks.
            splits: the number of rows for each rank, in order; ``None``: equally many.
            name: shown in errors.

        Returns:
            The rows received, in the order of the senders, and the number of rows from each.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connections; all members must call it."""
