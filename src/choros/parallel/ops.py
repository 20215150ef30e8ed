"""The collectives on any framework's arrays, in Horovod's words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArraySpec, adapter_of
from choros.comm import BFLOAT16, ProcessSet, ReduceOp, global_process_set
from choros.errors import ConfigError
from choros.parallel.compression import Compression, Compressor

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_arrays", "op_of", "reducescatter"]

Array = NDArray[Any]


def allreduce(
    value: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``value`` over the ranks; every rank gets the result.

    Args:
        value: an array of any framework, also inside ``tf.function`` or ``jax.jit``, or a number. The average
            of Python integers is a float.
        op: how values are combined.
        name: shown in errors; ranks that give different names mismatch.
        prescale_factor: what floating-point values are multiplied by before they are combined.
        postscale_factor: what they are multiplied by afterwards.
        compression: the dtype in which they travel, ``none``'s or ``fp16``'s; the others are for gradients.
        process_set: the ranks that take part.

    Returns:
        The same kind of array, or number.

    Example:
        >>> import choros
        >>> choros.init()
        >>> allreduce(3)
        3.0
    """
    communicator = process_set.communicator
    if op is ReduceOp.AVERAGE and isinstance(value, (bool, int)):
        value = float(value)

    def reduce(host: Array) -> Array:
        wire = host.dtype if host.dtype == BFLOAT16 else compression.wire_dtype(host.dtype)
        factor, wire_op = prescale_factor, op
        if op is ReduceOp.AVERAGE and wire != host.dtype:
            # Divided before it is made small: the sum need not fit what travels.
            factor, wire_op = prescale_factor / communicator.size, ReduceOp.SUM
        reduced = communicator.allreduce(_scaled(host, factor).astype(wire, copy=False), wire_op, name=name or "")
        return _scaled(reduced.astype(host.dtype, copy=False), postscale_factor)

    return _call(reduce, value, lambda spec: spec.shape)


def op_of(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """What Horovod's two arguments of ``allreduce`` come to: the average, if neither is given.

    The warning that ``average`` is deprecated points at the caller of the function that calls this.

    Raises:
        ConfigError: both are given.

    Example:
        >>> op_of(None, ReduceOp.SUM)
        <ReduceOp.SUM: 'Sum'>
    """
    if average is None:
        return op or ReduceOp.AVERAGE
    if op is not None:
        raise ConfigError("allreduce: give op or average, not both; average is the older form.")
    warnings.warn("allreduce(average=…) is deprecated: use op=Average or op=Sum.", DeprecationWarning, stacklevel=3)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def allgather(value: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' arrays along the first dimension, which may differ between ranks.

    Args:
        value: an array of any framework. Inside ``jax.jit`` shapes must be known, so there every rank must
            bring equally many rows.
        name: shown in errors.
        process_set: the ranks that take part.
    """
    communicator = process_set.communicator
    adapter = adapter_of(value)

    def shape(spec: ArraySpec) -> tuple[int | None, ...]:
        rows = spec.shape[0] if spec.shape else 1
        known = rows is not None and adapter.static_shapes
        return (rows * communicator.size if known and rows is not None else None, *spec.shape[1:])

    return _call(lambda host: communicator.allgather(host, name=name or ""), _as_array(value), shape)


def broadcast(
    value: Any, root_rank: int, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gives every rank the ``value`` of ``root_rank``.

    Args:
        value: an array of any framework or a number; the same shape and dtype on every rank.
        root_rank: a *global* rank, also within a process set (as in Horovod).
        name: shown in errors.
        process_set: the ranks that take part.
    """
    communicator = process_set.communicator
    root = _member(root_rank, process_set)
    return _call(lambda host: communicator.broadcast(host, root, name=name or ""), value, lambda spec: spec.shape)


def broadcast_arrays(
    arrays: Sequence[Array], root_rank: int, *, names: Sequence[str], process_set: ProcessSet = global_process_set
) -> list[Array]:
    """``broadcast`` of several host arrays, each under its name."""
    communicator = process_set.communicator
    root = _member(root_rank, process_set)
    return [communicator.broadcast(array, root, name=name) for array, name in zip(arrays, names, strict=True)]


def reducescatter(
    value: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``value`` over the ranks and gives each rank its rows; the first ranks get the remainder.

    Args:
        value: an array of any framework with at least one dimension, of the same shape on every rank.
        op: how values are combined.
        name: shown in errors.
        process_set: the ranks that take part.
    """
    communicator = process_set.communicator

    def shape(spec: ArraySpec) -> tuple[int | None, ...]:
        rows = spec.shape[0] if spec.shape else 0
        if rows is None:
            return (None, *spec.shape[1:])
        return (rows // communicator.size + (communicator.rank < rows % communicator.size), *spec.shape[1:])

    return _call(lambda host: communicator.reducescatter(host, op, name=name or ""), _as_array(value), shape)


def alltoall(
    value: Any, splits: Any = None, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of ``value`` to every rank and gathers the rows meant for this one.

    Args:
        value: an array of any framework.
        splits: how many rows go to each rank; ``None`` deals them out equally.
        name: shown in errors.
        process_set: the ranks that take part.

    Returns:
        The rows received; with ``splits``, a pair of them and how many came from each rank.
    """
    communicator = process_set.communicator
    array = _as_array(value)
    adapter = adapter_of(array)
    spec = adapter.spec(array)
    rows = spec.shape[0] if splits is None and adapter.static_shapes and spec.shape else None
    outputs = [
        ArraySpec((rows, *spec.shape[1:]), spec.dtype),
        ArraySpec((communicator.size,), np.dtype(np.int32)),
    ]

    def exchange(hosts: Sequence[Array]) -> Sequence[Array]:
        return communicator.alltoall(hosts[0], hosts[1] if len(hosts) > 1 else None, name=name or "")

    inputs = [array] if splits is None else [array, _adapted(splits, array)]
    received, counts = adapter.host_call(exchange, inputs, outputs)
    return received if splits is None else (received, counts)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    process_set.communicator.barrier()


def _adapted(value: Any, like: Any) -> Any:
    adapter = adapter_of(like)
    return value if adapter_of(value) is adapter else adapter.from_host(np.asarray(value), like)


def _member(root_rank: int, process_set: ProcessSet) -> int:
    if root_rank not in process_set.communicator.ranks:
        raise ConfigError(f"root_rank={root_rank} is not one of the ranks {process_set.ranks} that take part.")
    return process_set.communicator.ranks.index(root_rank)


def _as_array(value: Any) -> Any:
    """Numbers and lists as arrays: for results that are arrays whatever was given."""
    return np.asarray(value) if isinstance(value, (bool, int, float, list, tuple)) else value


def _scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    if array.dtype.kind in "iub":
        raise ConfigError(f"prescale_factor and postscale_factor need floating-point values, not {array.dtype}.")
    scaled: Array = array * array.dtype.type(factor)
    return scaled


def _call(function: Callable[[Array], Array], value: Any, shape: Callable[[ArraySpec], tuple[int | None, ...]]) -> Any:
    """``function`` on the host for one array in, one array out, in a compiled function or not."""
    adapter = adapter_of(value)
    spec = adapter.spec(value)
    (result,) = adapter.host_call(lambda hosts: [function(hosts[0])], [value], [ArraySpec(shape(spec), spec.dtype)])
    return result
