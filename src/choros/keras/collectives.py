"""The collectives with the arguments of Horovod's Keras face, on Keras variables too.

Gradients flow through them; see ``parallel/ops.py`` for what they are.
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
    """Reduces ``value`` over the ranks: their average, if ``op`` says nothing else.

    Args:
        value: an array, tensor or variable of any framework, eager or in a compiled function, or a number.
        name: shown in errors.
        average: Horovod's older form of ``op``; deprecated.
        prescale_factor: what values are multiplied by before they are combined.
        postscale_factor: what they are multiplied by afterwards.
        op: how values are combined.
        compression: the dtype in which they travel, that of ``none`` or ``fp16``.
        process_set: the ranks that take part.

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
    """Gives every rank the ``value`` of ``root_rank``: an array of one shape and dtype, or a number."""
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
    """Sends rows of ``value`` to every rank and gathers those meant for this one.

    Returns:
        The rows received; with ``splits`` (rows for each rank) a pair of them and how many each rank sent.
    """
    return ops.alltoall(_tensor(value), splits, name=name, process_set=process_set)


def _tensor(value: Any) -> Any:
    return value.value if isinstance(value, keras.Variable) else value
