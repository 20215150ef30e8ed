"""The collectives with the arguments of Horovod's Keras API, also for Keras variables.

They are differentiable; ``parallel/ops.py`` documents their gradients.
"""

from __future__ import annotations

from typing import Any

import keras

from choros.comm import ProcessSet, Reduction, global_process_set
from choros.parallel import ops
from choros.parallel.compression import Compression, Compressor

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Reduction | None = None,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``value`` over the ranks, by default to the average.

    Args:
        value: an array, tensor or variable of any framework, eager or in a compiled function, or a number.
        name: the name shown in errors.
        average: Horovod's older form of ``op``; deprecated.
        prescale_factor: the factor applied to values before the reduction.
        postscale_factor: the factor applied to the result.
        op: the reduction.
        compression: the dtype in which values are sent, that of ``none`` or ``fp16``.
        process_set: the ranks that participate.

    Raises:
        ConfigError: both ``average`` and ``op`` are given.

    Example:
        >>> import choros.keras as hvd
        >>> hvd.init()
        >>> hvd.allreduce(2.5, op=hvd.Sum)
        2.5
    """
    return ops.allreduce(
        _tensor(value),
        ops.op_of(average, op),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        process_set=process_set,
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' arrays along the first dimension, which may differ between ranks."""
    return ops.allgather(_tensor(value), name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Sends the ``value`` of ``root_rank`` to every rank: an array of the same shape and dtype on all, or a number."""
    return ops.broadcast(_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: Reduction = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``value`` over the ranks and gives each its rows; the first ranks get the remainder."""
    return ops.reducescatter(_tensor(value), op, name=name, process_set=process_set)


def alltoall(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of ``value`` to every rank and receives rows from every rank.

    Returns:
        The rows received; with ``splits`` (the number of rows for each rank) a pair of them and the numbers of rows
        that each rank sent.
    """
    return ops.alltoall(_tensor(value), splits, name=name, process_set=process_set)


def _tensor(value: Any) -> Any:
    return value.value if isinstance(value, keras.Variable) else value
