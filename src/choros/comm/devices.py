"""Collectives on device tensors, without copies to the host, which some engines provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, final

from choros.comm.reduction import Reduction

__all__ = ["DeviceCollectives"]


class DeviceCollectives(ABC):
    """The collectives of a communicator's members on tensors that stay on their device.

    ::

        control plane (MPI, Gloo)            device (NCCL)
        same request on all ranks? ── yes ──► reduce; the current stream waits for it, the host does not

    Every method must be called by all members, in the same order, each with tensors on its own device. Tensors are
    any objects with DLPack's protocol; a tensor to overwrite must be torch's, as other frameworks' arrays are
    immutable. Calls that are not identical raise a ``MismatchError`` on all members before data moves. Results are
    available to operations enqueued later on the device's current stream.

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
    def reduce_in_place(self, tensor: Any, op: Reduction) -> None:
        """``allreduce``, unchecked: call it inside ``exclusive()`` of the communicator after ``agree``."""

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
