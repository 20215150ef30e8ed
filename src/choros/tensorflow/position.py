"""This process's position as a tensor, which a graph computes in each of its runs; and ``join``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from choros.comm import context, is_initialized, registered_process_sets
from choros.errors import ConfigError
from choros.tensorflow.reduction import join_all

#: What ``process_set_included_op`` returns in place of an answer, as in Horovod.
_NOT_INITIALIZED, _UNKNOWN = -1, -2


def rank_op(name: str | None = None) -> Any:
    """``rank()`` as an int32 scalar.

    Args:
        name: that of the operation.

    Example:
        >>> import choros.tensorflow as hvd
        >>> hvd.init()
        >>> int(hvd.rank_op())
        0
    """
    return _scalar(context.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """``local_rank()`` as an int32 scalar."""
    return _scalar(context.local_rank, name)


def local_size_op(name: str | None = None) -> Any:
    """``local_size()`` as an int32 scalar."""
    return _scalar(context.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks of a process set as an int32 scalar.

    Args:
        process_set_id: its number, ``0`` for all ranks.
        name: that of the operation.
    """
    return _scalar(lambda: _size(process_set_id), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this process is in a process set, as an int32 scalar.

    Args:
        process_set_id: its number.
        name: that of the operation.

    Returns:
        1 or 0; -1 before ``init()``, and -2 if there is no such set.
    """
    return _scalar(lambda: _included(process_set_id), name)


def join() -> Any:
    """Participates in the collectives of the other ranks until all ranks have joined (Horovod's ``join``).

    A rank calls it when it has no more batches. It gives zeros to the others' reductions: gradients of tapes are then
    averaged over the ranks that still have batches, and ``allreduce`` over all ranks, as in Horovod. It does not update
    its variables: broadcast them from the rank that is returned.

    Returns:
        The rank that was the last to join, the same on every rank, as an int32 scalar.

    Raises:
        MismatchError: on all ranks, if the others broadcast from a rank that has joined or gather weights, or if this
            rank has never computed the gradients that they compress by ``Compression.power_sgd``.

    Example:
        >>> import choros.tensorflow as hvd
        >>> hvd.init()
        >>> int(hvd.join())
        0
    """
    return _scalar(join_all, None)


def _size(process_set_id: int) -> int:
    process_set = registered_process_sets().get(process_set_id)
    if process_set is None:
        raise ConfigError(f"process_set_id={process_set_id}: there is no process set of this number.")
    return len(process_set.ranks)


def _included(process_set_id: int) -> int:
    if not is_initialized():
        return _NOT_INITIALIZED
    process_set = registered_process_sets().get(process_set_id)
    return _UNKNOWN if process_set is None else int(bool(process_set.included()))


def _scalar(answer: Callable[[], int], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(answer(), tf.int32)
    scalar = tf.numpy_function(lambda: np.int32(answer()), [], tf.int32, name=name)
    scalar.set_shape([])
    return scalar
