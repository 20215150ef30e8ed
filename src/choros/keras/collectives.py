"""Horovod's Keras collectives, with its gradients, also for Keras variables; ``parallel/ops.py`` lists them."""

from typing import Any

from choros.comm import ProcessSet, Reduction, global_process_set
from choros.parallel import ops
from choros.parallel.arguments import documented, op_of
from choros.parallel.calls import options_of
from choros.parallel.compression import Compression, Compressor
from choros.training.variables import value_of


@documented()
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

    Its gradient is the same allreduce of the gradients. With ``Min``, ``Max``, ``Product`` or ``Adasum`` that is what
    Horovod computes, not the derivative.

    Raises:
        ConfigError: both ``average`` and ``op`` are given.

    Example:
        >>> import choros.keras as hvd
        >>> hvd.init()
        >>> hvd.allreduce(2.5, op=hvd.Sum)
        2.5
    """
    options = options_of(name, process_set, prescale_factor, postscale_factor, compression)
    return ops.allreduce(value_of(value), op_of(average, op), **options)


@documented()
def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' arrays along the first dimension, which may differ between ranks."""
    return ops.allgather(value_of(value), name=name, process_set=process_set, horovod_gradients=True)


@documented()
def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Sends the ``value`` of ``root_rank`` to every rank: an array of the same shape and dtype on all, or a number."""
    return ops.broadcast(value_of(value), root_rank, name=name, process_set=process_set, horovod_gradients=True)


@documented()
def reducescatter(
    value: Any,
    name: str | None = None,
    op: Reduction = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``value`` over the ranks and gives each its rows; the first ranks get the remainder."""
    return ops.reducescatter(value_of(value), op, name=name, process_set=process_set, horovod_gradients=True)


@documented()
def alltoall(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of ``value`` to every rank and receives rows from every rank.

    Returns:
        The rows received; with ``splits`` a pair of them and the numbers of rows that each rank sent.
    """
    return ops.alltoall(value_of(value), splits, name=name, process_set=process_set)
