"""The collectives with the arguments and gradients (``parallel/ops.py``) of Horovod's TensorFlow API, eager or not; and
this process's position as a tensor, which a graph computes in each of its runs.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from choros.arrays.tensorflow_arrays import tensorflow_errors
from choros.comm import ProcessSet, Reduction, context, global_process_set, is_initialized, registered_process_sets
from choros.errors import ConfigError
from choros.parallel import objects, ops
from choros.parallel.arguments import documented, op_of
from choros.parallel.calls import options_of
from choros.parallel.compression import Compression, Compressor
from choros.training.variables import value_of

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "broadcast_object_fn",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]


P = ParamSpec("P")
T = TypeVar("T")
#: The stack level of the caller of these functions, which TensorFlow's decorator calls.
_CALLER = 5
_SESSION = "Horovod's; has no effect, because objects do not pass through TensorFlow."


def in_session_graph() -> bool:
    """Whether operations are added to a graph of TensorFlow 1, which a session runs: those that are asked for alone."""
    return not (tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function)


def unconverted(function: Callable[P, T]) -> Callable[P, T]:
    """Keeps AutoGraph from converting ``function``, and what it calls, where it is called in a ``tf.function``."""
    public: Callable[P, T] = functools.wraps(function)(tf.autograph.experimental.do_not_convert(function))
    return public


def _public(function: Callable[P, T]) -> Callable[P, T]:
    return unconverted(documented()(tensorflow_errors()(function)))


@_public
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces ``tensor`` over the ranks; averages by default.

    The rows of ``tf.IndexedSlices`` are gathered in rank order, which is their sum.

    Its gradient is the same allreduce of the gradients. With ``Min``, ``Max``, ``Product`` or ``Adasum`` that is what
    Horovod computes, not the derivative.

    Returns:
        A tensor of the same shape and dtype; ``tf.IndexedSlices`` for such; a number for a number.

    Raises:
        ConfigError: both ``average`` and ``op`` are given.
        MismatchError: ranks have different shapes, dtypes or arguments.

    Example:
        >>> import tensorflow as tf, choros.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist()
        [1.0, 1.0]
    """
    del device_dense, device_sparse, ignore_name_scope
    options = options_of(_name(name, "allreduce", tensor), process_set, prescale_factor, postscale_factor, compression)
    return ops.allreduce(_tensor(tensor), op_of(average, op, stacklevel=_CALLER), **options)


@_public
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """``allreduce`` of several tensors, in as few messages as possible."""
    del device_dense, device_sparse, ignore_name_scope
    tensors = list(tensors)  # it may be an iterator
    options = options_of(
        _name(name, "grouped_allreduce", *tensors), process_set, prescale_factor, postscale_factor, compression
    )
    return ops.grouped_allreduce(
        [_tensor(tensor) for tensor in tensors], op_of(average, op, stacklevel=_CALLER), **options
    )


@_public
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenates the ranks' tensors along the first dimension, which may differ between ranks."""
    del ignore_name_scope
    name = _name(name, "allgather", tensor)
    return ops.allgather(_tensor(tensor), name=name, process_set=process_set, horovod_gradients=True)


@_public
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """``allgather`` of several tensors."""
    del ignore_name_scope
    return ops.grouped_allgather(
        [_tensor(tensor) for tensor in tensors],
        name=_name(name, "grouped_allgather", *tensors),
        process_set=process_set,
        horovod_gradients=True,
    )


@_public
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends the ``tensor`` of ``root_rank`` to every rank; all have the same shape and dtype."""
    del ignore_name_scope
    name = _name(name, "broadcast", tensor)
    return ops.broadcast(_tensor(tensor), root_rank, name=name, process_set=process_set, horovod_gradients=True)


@_public
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of ``tensor`` to every rank and returns the rows that all ranks sent to this one.

    Returns:
        The received rows; with ``splits`` a pair of these and the number of rows from each rank.
    """
    del ignore_name_scope
    splits = None if splits is None else _tensor(splits)
    return ops.alltoall(_tensor(tensor), splits, name=_name(name, "alltoall", tensor), process_set=process_set)


@_public
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: Reduction = Reduction.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces ``tensor`` over the ranks and returns this rank's rows; the first ranks get the remainder."""
    del device_dense, ignore_name_scope
    options = options_of(
        _name(name, "reducescatter", tensor), process_set, prescale_factor, postscale_factor, compression
    )
    return ops.reducescatter(_tensor(tensor), op, **options)


@_public
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: Reduction = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """``reducescatter`` of several tensors, in as few messages as possible."""
    del device_dense
    tensors = list(tensors)
    options = options_of(
        _name(None, "grouped_reducescatter", *tensors), process_set, prescale_factor, postscale_factor, compression
    )
    return ops.grouped_reducescatter([_tensor(tensor) for tensor in tensors], op, **options)


@documented(obj="any object that cloudpickle supports; ignored on other ranks.", session=_SESSION)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends the object of ``root_rank`` to every rank.

    Returns:
        A copy of the object; on the root, ``obj`` itself.

    Example:
        >>> import choros.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    del session
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns ``broadcast_object`` as a function of the object alone."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@documented(obj="the object of this rank.", session=_SESSION)
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in rank order, on every rank."""
    del session
    return objects.allgather_object(obj, name, process_set)


def _tensor(value: Any) -> Any:
    """``value`` as TensorFlow's own; Python's numbers remain numbers."""
    return tf.convert_to_tensor(value) if isinstance(value, (list, tuple, np.ndarray, np.generic)) else value_of(value)


def _name(name: str | None, collective: str, *tensors: Any) -> str | None:
    """The name given; in a graph of TensorFlow 1, which runs its operations in any order, one made of the tensors'."""
    if name is not None or not in_session_graph():
        return name
    ends = [tensors[0], *tensors[1:][-1:]]
    made = re.sub(r"\W", "_", "_".join([collective, *(str(getattr(tensor, "name", "")) for tensor in ends)]))
    unique: str = tf.compat.v1.get_default_graph().unique_name(made)
    return unique


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
    return scalar(context.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """``local_rank()`` as an int32 scalar."""
    return scalar(context.local_rank, name)


def local_size_op(name: str | None = None) -> Any:
    """``local_size()`` as an int32 scalar."""
    return scalar(context.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks of a process set as an int32 scalar.

    Args:
        process_set_id: its number, ``0`` for all ranks.
        name: that of the operation.
    """
    return scalar(lambda: _size(process_set_id), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this process is in a process set, as an int32 scalar.

    Args:
        process_set_id: its number.
        name: that of the operation.

    Returns:
        1 or 0; -1 before ``init()``, and -2 if there is no such set.
    """
    return scalar(lambda: _included(process_set_id), name)


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


def scalar(answer: Callable[[], int], name: str | None) -> Any:
    """What ``answer`` says in each run, as an int32 scalar."""
    if tf.executing_eagerly():
        return tf.constant(answer(), tf.int32)
    scalar = tf.numpy_function(lambda: np.int32(answer()), [], tf.int32, name=name)
    scalar.set_shape([])
    return scalar
