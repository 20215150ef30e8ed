"""The devices of a process, and a connection of them: collectives on device tensors, without copies to the host."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from choros.comm.reduction import Reduction

#: DLPack's numbers of devices, by PyTorch's names. Pinned memory is the host's, and PyTorch calls AMD's GPUs cuda.
_TYPES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "cuda"}


@dataclass(frozen=True)
class Device:
    """A device of this process: its type, such as ``cuda`` or ``cpu``, and its number, as CUDA numbers it."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


def device_of(array: Any) -> Device:
    """Returns the device of a tensor of torch, or of any array with DLPack's protocol.

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
