"""The collectives on any framework's arrays, with Horovod's names, and their gradients.

Gradients are those of the sum of all ranks' losses. Each collective is linear, and its gradient is its adjoint::

    allreduce (sum, average)    allreduce, with the same factors
    allgather                   each rank gets the sum of all ranks' gradients of its own rows    (_reduce_own_rows)
    broadcast                   the root gets the sum of all ranks' gradients, the others zeros   (_reduce_to_root)
    reducescatter               allgather
    alltoall                    alltoall, back to the ranks that sent the rows

The backward pass is therefore a collective, too: all ranks must compute the gradient, or none. Integers have no
gradient, and neither have minima, maxima and products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArrayAdapter, ArrayFunction, ArraySpec, HostFunction, adapter_of
from choros.comm import BFLOAT16, ProcessSet, Reduction, global_process_set
from choros.comm.reduction import working_dtype
from choros.errors import ConfigError
from choros.parallel.compression import Compression, Compressor
from choros.topology import shard_range

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_arrays",
    "grouped_allreduce",
    "op_of",
    "reducescatter",
]

Array = NDArray[Any]
#: The operations that have a gradient.
_LINEAR = (Reduction.SUM, Reduction.AVERAGE)


def allreduce(
    value: Any,
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``value`` over the ranks; every rank receives the result.

    Args:
        value: an array of any framework, also inside ``tf.function`` or ``jax.jit``, or a number. The average
            of Python integers is a float. The rows of a sparse gradient (``tf.IndexedSlices``) are gathered in rank
            order, which is their sum; such a one has no minimum, maximum or product.
        op: the reduction.
        name: shown in errors; it must be the same on every rank.
        prescale_factor: the factor of floating-point values before the reduction.
        postscale_factor: their factor after it.
        compression: the dtype in which they are sent: ``none`` or ``fp16``; the others are for gradients only.
        process_set: the participating ranks.

    Returns:
        An array of the same framework, or a number.

    Example:
        >>> import choros
        >>> choros.init()
        >>> allreduce(3)
        3.0
    """
    communicator, op = process_set.communicator, Reduction(op)
    if (rows := adapter_of(value).rows_of(value)) is not None:
        factor = prescale_factor * postscale_factor / (communicator.size if op is Reduction.AVERAGE else 1)
        return _gather_rows(rows, op, factor, name=name, compression=compression, process_set=process_set)
    value = _averageable(value, op)

    def reduce(host: Array) -> Array:
        wire = host.dtype if host.dtype == BFLOAT16 else compression.wire_dtype(host.dtype)
        factor, wire_op = prescale_factor, op
        if op is Reduction.AVERAGE and wire != host.dtype:
            # Divided before the cast: the sum may overflow the narrower dtype.
            factor, wire_op = prescale_factor / communicator.size, Reduction.SUM
        reduced = communicator.allreduce(_scaled(host, factor).astype(wire, copy=False), wire_op, name=name or "")
        return _scaled(reduced.astype(host.dtype, copy=False), postscale_factor)

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        return [
            allreduce(
                gradients[0],
                op,
                name=_gradient_of(name, "allreduce"),
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                compression=compression,
                process_set=process_set,
            )
        ]

    return _call(reduce, value, backward if op in _LINEAR else None)


def _gather_rows(
    rows: tuple[Any, Any, Any],
    op: Reduction,
    factor: float,
    *,
    name: str | None,
    compression: Compressor,
    process_set: ProcessSet,
) -> Any:
    """``allreduce`` of a sparse gradient: all ranks' rows, times ``factor``."""
    indices, values, shape = rows
    adapter = adapter_of(values)
    spec = adapter.spec(values)
    if op not in _LINEAR:
        raise ConfigError(
            f"allreduce(op={op.value}): the rows of a sparse gradient (IndexedSlices) are gathered, which is their "
            "sum: use Sum or Average, or make it dense."
        )
    if factor != 1.0:
        if not _is_floating(spec):
            raise ConfigError(
                f"allreduce: sparse gradients (IndexedSlices) of {spec.dtype} cannot be averaged or scaled: use "
                "op=Sum, or cast them to float32."
            )
        values = values * factor
    values = allgather(adapter.cast(values, compression.row_dtype(spec.dtype)), name=name, process_set=process_set)
    indices = allgather(indices, name=f"indices of {name}" if name else None, process_set=process_set)
    return adapter.from_rows(indices, adapter.cast(values, spec.dtype), shape)


def grouped_allreduce(
    values: Sequence[Any],
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """``allreduce`` of several values in one message: those of one framework need one host call.

    Args:
        values: arrays of any framework, or numbers; the same on every rank, in the same order. Sparse gradients have
            messages of their own.
        op: the reduction.
        name: shown in errors.
        process_set: the participating ranks.

    Example:
        >>> import choros
        >>> choros.init()
        >>> grouped_allreduce([1.5, [2.0, 3.0]], Reduction.SUM)
        [1.5, array([2., 3.])]
    """
    communicator, op = process_set.communicator, Reduction(op)
    groups: dict[ArrayAdapter, list[int]] = {}
    results = list(values)
    for index, value in enumerate(values):
        if adapter_of(value).rows_of(value) is None:
            groups.setdefault(adapter_of(value), []).append(index)
        else:
            results[index] = allreduce(value, op, name=name, process_set=process_set)

    def reduce(hosts: Sequence[Array]) -> Sequence[Array]:
        return communicator.grouped_allreduce(hosts, op, name=name or "")

    for adapter, indices in groups.items():
        arrays = [_as_array(_averageable(values[index], op)) for index in indices]
        specs = [adapter.spec(array) for array in arrays]

        def backward(gradients: Sequence[Any], specs: Sequence[ArraySpec] = specs) -> Sequence[Any]:
            floats = [gradient for gradient, spec in zip(gradients, specs, strict=True) if _is_floating(spec)]
            reduced = iter(
                grouped_allreduce(floats, op, name=_gradient_of(name, "grouped_allreduce"), process_set=process_set)
            )
            return [next(reduced) if _is_floating(spec) else None for spec in specs]

        reduced = _host_call(adapter, reduce, arrays, specs, backward if op in _LINEAR else None)
        for index, array in zip(indices, reduced, strict=True):
            results[index] = array.item() if isinstance(values[index], (bool, int, float)) else array
    return results


def op_of(average: bool | None, op: Reduction | None) -> Reduction:
    """Returns the reduction that Horovod's two arguments of ``allreduce`` select: the average, if neither is given.

    The deprecation warning of ``average`` points at the caller of the function that calls this one.

    Raises:
        ConfigError: both are given.

    Example:
        >>> op_of(None, Reduction.SUM)
        <Reduction.SUM: 'Sum'>
    """
    if average is None:
        return Reduction.AVERAGE if op is None else Reduction(op)
    if op is not None:
        raise ConfigError("allreduce: pass op or average, not both; average is deprecated.")
    warnings.warn("allreduce(average=…) is deprecated: use op=Average or op=Sum.", DeprecationWarning, stacklevel=3)
    return Reduction.AVERAGE if average else Reduction.SUM


def allgather(
    value: Any, *, axis: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenates the ranks' arrays along one dimension, which may differ between ranks.

    Args:
        value: an array of any framework; a number counts as an array with one row. Inside ``jax.jit`` shapes must be
            known: there all ranks must contribute equally many rows.
        axis: the dimension.
        name: shown in errors.
        process_set: the participating ranks.

    Raises:
        ConfigError: ``value`` has no such dimension.
    """
    value = _as_array(value)
    adapter = adapter_of(value)
    spec = adapter.spec(value)
    if not spec.shape:
        value, spec = value[None], ArraySpec((1,), spec.dtype)
    if not -len(spec.shape) <= axis < len(spec.shape):
        raise ConfigError(f"allgather(axis={axis}): the array has the shape {spec.shape}, which has no such dimension.")
    own = spec.shape[axis]
    total = own * process_set.communicator.size if own is not None and adapter.static_shapes else None
    return _allgather_along(value, spec, axis % len(spec.shape), total, name=name or "", process_set=process_set)


def _allgather_along(
    value: Any, spec: ArraySpec, axis: int, total: int | None, *, name: str, process_set: ProcessSet
) -> Any:
    """``allgather`` of ``value``, which has ``spec``; ``total`` is the result's extent along ``axis``, if known."""
    communicator = process_set.communicator
    adapter = adapter_of(value)
    extent = adapter.extent(value, axis) if spec.shape[axis] is None else spec.shape[axis]

    def gather(hosts: Sequence[Array]) -> Sequence[Array]:
        return [_along(axis, hosts[0], lambda rows: communicator.allgather(rows, name=name))]

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradient_name = _gradient_of(name, "allgather")
        return [_reduce_own_rows(gradients[0], extent, axis, name=gradient_name, process_set=process_set)]

    output = ArraySpec(_replaced(spec.shape, axis, total), spec.dtype)
    (result,) = _host_call(adapter, gather, [value], [output], backward)
    return result


def _reduce_own_rows(value: Any, extent: Any, axis: int, *, name: str, process_set: ProcessSet) -> Any:
    """The adjoint of ``allgather``: the sum over the ranks of this rank's rows in their arrays."""
    communicator = process_set.communicator
    adapter = adapter_of(value)
    known = isinstance(extent, int)

    def reduce(hosts: Sequence[Array]) -> Sequence[Array]:
        own = int(extent if known else hosts[1])
        extents = communicator.allgather(np.array([own], np.int64), name=f"{name} (extents)")

        def sum_of_parts(rows: Array) -> Array:
            parts, _ = communicator.alltoall(rows, extents, name=name)
            parts = parts.reshape(communicator.size, own, *rows.shape[1:])
            reduced: Array = parts.sum(axis=0, dtype=working_dtype(parts.dtype)).astype(parts.dtype, copy=False)
            return reduced

        return [_along(axis, hosts[0], sum_of_parts)]

    spec = adapter.spec(value)

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradient_name = _gradient_of(name, "allgather")
        gathered = _allgather_along(
            gradients[0], output, axis, spec.shape[axis], name=gradient_name, process_set=process_set
        )
        return [gathered, *(None for _ in inputs[1:])]

    output = ArraySpec(_replaced(spec.shape, axis, extent if known else None), spec.dtype)
    inputs = [value] if known else [value, extent]
    (result,) = _host_call(adapter, reduce, inputs, [output], backward)
    return result


def broadcast(
    value: Any, root_rank: int, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the ``value`` of ``root_rank`` to every rank.

    Args:
        value: an array of any framework, or a number; of the same shape and dtype on every rank.
        root_rank: a *global* rank, also within a process set (as in Horovod).
        name: shown in errors.
        process_set: the participating ranks.
    """
    communicator = process_set.communicator
    root = _root_index(root_rank, process_set)

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradient_name = _gradient_of(name, "broadcast")
        return [_reduce_to_root(gradients[0], root_rank, name=gradient_name, process_set=process_set)]

    def send(host: Array) -> Array:
        return communicator.broadcast(host, root, name=name or "")

    return _call(send, value, backward)


def _reduce_to_root(value: Any, root_rank: int, *, name: str, process_set: ProcessSet) -> Any:
    """The adjoint of ``broadcast``: the sum of all ranks' values on the root, zeros on the other ranks."""
    communicator = process_set.communicator
    is_root = communicator.rank == _root_index(root_rank, process_set)

    def reduce(host: Array) -> Array:
        total = communicator.allreduce(host, Reduction.SUM, name=name)
        return total if is_root else np.zeros_like(total)

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        return [broadcast(gradients[0], root_rank, name=_gradient_of(name, "broadcast"), process_set=process_set)]

    return _call(reduce, value, backward)


def broadcast_arrays(
    arrays: Sequence[Array], root_rank: int, *, names: Sequence[str], process_set: ProcessSet = global_process_set
) -> list[Array]:
    """``broadcast`` of several host arrays, each with its name."""
    communicator = process_set.communicator
    root = _root_index(root_rank, process_set)
    return [communicator.broadcast(array, root, name=name) for array, name in zip(arrays, names, strict=True)]


def reducescatter(
    value: Any,
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``value`` over the ranks and returns this rank's rows; the first ranks get the remainder.

    Args:
        value: an array of any framework with at least one dimension, of the same shape on every rank.
        op: the reduction.
        name: shown in errors.
        process_set: the participating ranks.
    """
    communicator, op = process_set.communicator, Reduction(op)
    value = _as_array(value)
    adapter = adapter_of(value)
    spec = adapter.spec(value)
    total = spec.shape[0] if spec.shape else 0
    own = None
    if total is not None:
        start, end = shard_range(total, communicator.rank, communicator.size)
        own = end - start
    output = ArraySpec((own, *spec.shape[1:]), spec.dtype)

    def scatter(hosts: Sequence[Array]) -> Sequence[Array]:
        return [communicator.reducescatter(hosts[0], op, name=name or "")]

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradient_name = _gradient_of(name, "reducescatter")
        gathered = _allgather_along(gradients[0], output, 0, total, name=gradient_name, process_set=process_set)
        return [gathered / communicator.size if op is Reduction.AVERAGE else gathered]

    (result,) = _host_call(adapter, scatter, [value], [output], backward if op in _LINEAR else None)
    return result


def alltoall(
    value: Any, splits: Any = None, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of ``value`` to every rank and returns the rows that all ranks sent to this one.

    Args:
        value: an array of any framework.
        splits: the number of rows for each rank; ``None`` splits them equally.
        name: shown in errors.
        process_set: the participating ranks.

    Returns:
        The received rows; with ``splits``, a pair of these and the number of rows from each rank.
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

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradient, received_counts = gradients
        gradient_name = _gradient_of(name, "alltoall")
        if rows is not None:
            return [alltoall(gradient, name=gradient_name, process_set=process_set)]
        returned, _ = alltoall(gradient, received_counts, name=gradient_name, process_set=process_set)
        return [returned, *(None for _ in inputs[1:])]

    inputs = [array] if splits is None else [array, _converted(splits, array)]
    received, counts = _host_call(adapter, exchange, inputs, outputs, backward)
    return received if splits is None else (received, counts)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    process_set.communicator.barrier()


def _converted(value: Any, like: Any) -> Any:
    adapter = adapter_of(like)
    return value if adapter_of(value) is adapter else adapter.from_host(np.asarray(value), like)


def _root_index(root_rank: int, process_set: ProcessSet) -> int:
    if root_rank not in process_set.communicator.ranks:
        raise ConfigError(f"root_rank={root_rank} is not one of the participating ranks {process_set.ranks}.")
    return process_set.communicator.ranks.index(root_rank)


def _averageable(value: Any, op: Reduction) -> Any:
    """Converts Python integers to floats for an average."""
    return float(value) if op is Reduction.AVERAGE and isinstance(value, (bool, int)) else value


def _as_array(value: Any) -> Any:
    """Converts numbers and lists to arrays, for collectives that always return arrays."""
    return np.asarray(value) if isinstance(value, (bool, int, float, list, tuple)) else value


def _scaled(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    if array.dtype.kind in "iub":
        raise ConfigError(
            f"prescale_factor and postscale_factor need floating-point values, not {array.dtype}: cast the array first."
        )
    scaled: Array = array * array.dtype.type(factor)
    return scaled


def _along(axis: int, host: Array, function: Callable[[Array], Array]) -> Array:
    """Applies ``function`` to the array with dimension ``axis`` moved to the front, and moves it back."""
    if axis == 0:
        return function(host)
    rows = np.ascontiguousarray(np.moveaxis(host, axis, 0))
    return np.ascontiguousarray(np.moveaxis(function(rows), 0, axis))


def _replaced(shape: tuple[int | None, ...], axis: int, extent: int | None) -> tuple[int | None, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _is_floating(spec: ArraySpec) -> bool:
    return spec.dtype == BFLOAT16 or spec.dtype.kind == "f"


def _gradient_of(name: str | None, collective: str) -> str:
    return f"gradient of {name or collective}"


def _call(function: Callable[[Array], Array], value: Any, gradient: ArrayFunction | None) -> Any:
    """``_host_call`` with one array and one result of the same shape and dtype."""
    adapter = adapter_of(value)
    output = adapter.spec(value)
    (result,) = _host_call(adapter, lambda hosts: [function(hosts[0])], [value], [output], gradient)
    return result


def _host_call(
    adapter: ArrayAdapter,
    function: HostFunction,
    arrays: Sequence[Any],
    outputs: Sequence[ArraySpec],
    gradient: ArrayFunction | None,
) -> list[Any]:
    """Calls ``function`` on the host, also from compiled code; ``gradient`` is its gradient rule, if it has one."""

    def forward(given: Sequence[Any]) -> Sequence[Any]:
        return adapter.host_call(function, given, outputs)

    if gradient is None or not any(_is_floating(output) for output in outputs):
        return list(forward(arrays))
    return adapter.with_gradient(forward, gradient, arrays)
