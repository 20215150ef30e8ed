"""The collectives with the arguments of Horovod's PyTorch API.

Those that return new tensors are differentiable; ``parallel/ops.py`` lists their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from choros.comm import ProcessSet, ReduceOp, Work, global_process_set
from choros.parallel import ops
from choros.parallel.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allreduce",
    "poll",
    "reducescatter",
    "synchronize",
]

T = TypeVar("T")


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``tensor`` over the ranks; averages by default.

    Args:
        tensor: a tensor of any shape, the same shape and dtype on every rank, or a number.
        average: Horovod's older form of ``op``; deprecated.
        name: shown in errors; it must be the same on every rank.
        compression: the dtype in which values are sent: ``none`` or ``fp16``.
        op: the reduction.
        prescale_factor: the factor of values before the reduction.
        postscale_factor: their factor after it.
        process_set: the participating ranks.

    Returns:
        A new tensor of the same shape and dtype, on the same device; a number for a number.

    Raises:
        ConfigError: both ``average`` and ``op`` are given.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum)
        tensor([1., 1.])
    """
    return ops.allreduce(
        tensor,
        ops.op_of(average, op),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        process_set=process_set,
    )


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``allreduce`` that overwrites ``tensor``, and returns it."""
    reduced = allreduce(
        tensor, average, name, Compression.none, op, prescale_factor, postscale_factor, process_set=process_set
    )
    return _overwrite(tensor, reduced)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Work[Any]:
    """Starts ``allreduce`` and returns a handle, whose result ``synchronize`` returns.

    ``tensor`` must not be changed until then.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> hvd.synchronize(handle)
        tensor([1., 1.])
    """
    op = ops.op_of(average, op)
    return _start(
        process_set,
        tensor,
        lambda: allreduce(
            tensor, None, name, Compression.none, op, prescale_factor, postscale_factor, process_set=process_set
        ),
    )


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Work[Any]:
    """``allreduce_async`` that overwrites ``tensor``."""
    op = ops.op_of(average, op)
    return _start(
        process_set,
        tensor,
        lambda: allreduce_(tensor, None, name, op, prescale_factor, postscale_factor, process_set),
    )


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """``allreduce`` of several tensors, fused into as few messages as possible."""
    return ops.grouped_allreduce(tensors, ops.op_of(average, op), name=name, process_set=process_set)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' tensors along the first dimension, which may differ between ranks."""
    return ops.allgather(tensor, name=name, process_set=process_set)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the ``tensor`` of the global rank ``root_rank`` to every rank; all have the same shape and dtype."""
    return ops.broadcast(tensor, root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """``broadcast`` that overwrites ``tensor``, and returns it."""
    return _overwrite(tensor, broadcast(tensor, root_rank, name, process_set))


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of ``tensor`` to every rank and returns the rows that all ranks sent to this one.

    Returns:
        The received rows; with ``splits`` (rows for each rank) a pair of these and the number of rows from each rank.
    """
    return ops.alltoall(tensor, splits, name=name, process_set=process_set)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``tensor`` over the ranks and returns this rank's rows; the first ranks get the remainder."""
    return ops.reducescatter(tensor, op, name=name, process_set=process_set)


def synchronize(handle: Work[T]) -> T:
    """Waits for the collective that ``…_async`` started; returns its result or raises its error."""
    return handle.wait()


def poll(handle: Work[Any]) -> bool:
    """Returns whether the collective is done, so that ``synchronize`` does not wait."""
    return handle.done()


def _overwrite(tensor: Any, value: Any) -> Any:
    with torch.no_grad():
        return tensor.copy_(value)


def _start(process_set: ProcessSet, tensor: Any, collective: Callable[[], T]) -> Work[T]:
    if tensor.device.type != "cpu":
        # The other thread uses another stream, which does not wait for the one that computes the tensor.
        torch.accelerator.synchronize(tensor.device)
    return process_set.communicator.start(collective)
