"""The collectives on any framework's arrays, with Horovod's names, and their gradients.

The gradient of a linear collective is its adjoint, which is that of the sum of all ranks' losses; in Horovod's APIs
it is Horovod's, which differs by a factor for three collectives (n is the number of ranks)::

    collective                 adjoint (Gradients.ADJOINT)                                    Gradients.HOROVOD
    allreduce (sum, average)   allreduce, with the same factors                               the same
    allreduce (other ops)      none, which is an error                                        allreduce, the same op
    allgather                  the sum of all ranks' gradients of this rank's rows            their average: 1/n
    broadcast                  the root gets the sum of all ranks' gradients, others zeros    their average: 1/n
    reducescatter              allgather, with the same factors, and 1/n if it averages       n times as much
    alltoall                   alltoall, back to the ranks that sent the rows                 the same

The backward pass is therefore a collective, too: all ranks must compute the gradient, or none. Integers have no
gradient. Horovod's of minima, maxima, products and Adasum, the same operation on the gradients, is not the derivative;
a reducescatter with them, which Horovod does not have, has none in either convention.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArrayAdapter, ArrayFunction, ArraySpec, HostFunction, adapter_of
from choros.comm import BFLOAT16, ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError, UnsupportedError
from choros.parallel.compression import Compression, Compressor
from choros.parallel.scaling import Scaling
from choros.topology import shard_range

__all__ = [
    "Gradients",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_arrays",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "op_of",
    "reducescatter",
]

Array = NDArray[Any]
#: The operations that have a gradient.
_LINEAR = (Reduction.SUM, Reduction.AVERAGE)


class Gradients(enum.Enum):
    """The gradients of collectives: their adjoints, or Horovod's; see the module."""

    ADJOINT = enum.auto()
    HOROVOD = enum.auto()

    def factor(self, collective: str, size: int) -> float:
        """Returns the factor of the adjoint of ``collective`` of ``size`` ranks."""
        if self is Gradients.ADJOINT:
            return 1.0
        return {"allgather": 1 / size, "broadcast": 1 / size, "reducescatter": float(size)}[collective]


def allreduce(
    value: Any,
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
    gradients: Gradients = Gradients.ADJOINT,
) -> Any:
    """Reduces ``value`` over the ranks; every rank receives the result.

    Args:
        value: an array of any framework, also inside ``tf.function`` or ``jax.jit``, or a number. The average
            of Python integers is a float. The rows of a sparse gradient (``tf.IndexedSlices``) are gathered in rank
            order, which is their sum; such a one has no minimum, maximum or product, and its average of integers is
            one of floats, as TensorFlow divides them.
        op: the reduction.
        name: shown in errors; it must be the same on every rank.
        prescale_factor: the factor of values before the reduction. Products with integers are computed in float64 and
            rounded towards zero.
        postscale_factor: their factor after it.
        compression: the dtype in which they are sent: ``none`` or ``fp16``; the others are for gradients only.
        process_set: the participating ranks.
        gradients: the convention of its gradient.

    Returns:
        An array of the same framework, or a number.

    Example:
        >>> import choros
        >>> choros.init()
        >>> allreduce(3)
        3.0
    """
    scaling = Scaling(Reduction(op), prescale_factor, postscale_factor, compression)
    rows = adapter_of(value).rows_of(value)  # AutoGraph, which reads this in a tf.function, has no walrus
    if rows is not None:
        return _gather_rows(rows, scaling, name=name, process_set=process_set)
    value = _averageable(value, scaling.op)
    (result,) = _allreduce_all("allreduce", [value], scaling, name, process_set, gradients)
    return result


def _allreduce_all(
    collective: str,
    values: Sequence[Any],
    scaling: Scaling,
    name: str | None,
    process_set: ProcessSet,
    gradients: Gradients,
) -> list[Any]:
    """``collective`` of dense values of one framework, in one call on the host."""
    communicator = process_set.communicator
    adapter = adapter_of(values[0])
    specs = [adapter.spec(value) for value in values]

    def reduce(hosts: Sequence[Array]) -> Sequence[Array]:
        if scaling.op is Reduction.ADASUM and any(map(_is_batch, hosts, specs)):
            raise ConfigError("op=Adasum combines whole arrays: it cannot be used under jax.vmap.")
        return scaling.allreduce(communicator, collective, hosts, name=name or "")

    def backward(upstream: Sequence[Any]) -> Sequence[Any]:
        if gradients is Gradients.ADJOINT:
            _check_linear(collective, scaling.op)
        floats = [gradient for gradient, spec in zip(upstream, specs, strict=True) if _is_floating(spec)]
        reduced = iter(
            _allreduce_all(collective, floats, scaling, _gradient_of(name, collective), process_set, gradients)
        )
        return [next(reduced) if _is_floating(spec) else None for spec in specs]

    return _host_call(adapter, reduce, values, specs, backward)


def _check_linear(collective: str, op: Reduction) -> None:
    """A ``ConfigError`` if a reduction whose gradient is needed has none."""
    if op not in _LINEAR:
        raise ConfigError(
            f"the gradient of {collective}(op={op.value}) is needed, which has none: use Sum or Average, or make its "
            "argument a constant (x.detach(), tf.stop_gradient(x), jax.lax.stop_gradient(x))."
        )


def _gather_rows(rows: tuple[Any, Any, Any], scaling: Scaling, *, name: str | None, process_set: ProcessSet) -> Any:
    """``allreduce`` of a sparse gradient: all ranks' rows, scaled."""
    if scaling.op not in _LINEAR:
        raise UnsupportedError(
            f"allreduce(op={scaling.op.value}): the rows of a sparse gradient (IndexedSlices) are gathered, which is "
            "their sum: use Sum or Average, or make it dense."
        )
    indices, values, shape = rows
    adapter = adapter_of(values)
    dtype = adapter.spec(values).dtype
    factor = scaling.factor / (process_set.communicator.size if scaling.op is Reduction.AVERAGE else 1)
    if not _is_floating(adapter.spec(values)):
        if scaling.factor != 1.0:
            raise UnsupportedError(
                f"allreduce: sparse gradients (IndexedSlices) of {dtype} cannot be scaled: cast them to float32."
            )
        if scaling.op is Reduction.AVERAGE:
            dtype = np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
            values = adapter.cast(values, dtype)
    if factor != 1.0:
        values = values * factor
    wire = scaling.compression.row_dtype(dtype)
    values = allgather(adapter.cast(values, wire), name=name, process_set=process_set)
    indices = allgather(indices, name=f"indices of {name}" if name else None, process_set=process_set)
    return adapter.from_rows(indices, adapter.cast(values, dtype), shape)


def grouped_allreduce(
    values: Sequence[Any],
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
    gradients: Gradients = Gradients.ADJOINT,
) -> list[Any]:
    """``allreduce`` of several values in one message: those of one framework need one host call.

    Args:
        values: arrays of any framework, or numbers; the same on every rank, in the same order. Sparse gradients have
            messages of their own.
        op: the reduction. Adasum combines each value for itself.
        name: shown in errors.
        prescale_factor: as for ``allreduce``.
        postscale_factor: likewise.
        compression: likewise.
        process_set: the participating ranks.
        gradients: the convention of their gradients.

    Example:
        >>> import choros
        >>> choros.init()
        >>> grouped_allreduce([1.5, [2.0, 3.0]], Reduction.SUM)
        [1.5, array([2., 3.])]
    """
    scaling = Scaling(Reduction(op), prescale_factor, postscale_factor, compression)
    results = list(values)
    dense = []
    for index, value in enumerate(values):
        rows = adapter_of(value).rows_of(value)
        if rows is None:
            dense.append(index)
        else:
            results[index] = _gather_rows(rows, scaling, name=name, process_set=process_set)
    arrays = {index: _as_array(_averageable(values[index], scaling.op)) for index in dense}
    for indices in _by_framework(arrays):
        group = [arrays[index] for index in indices]
        reduced = _allreduce_all("grouped_allreduce", group, scaling, name, process_set, gradients)
        for index, array in zip(indices, reduced, strict=True):
            results[index] = array.item() if isinstance(values[index], (bool, int, float)) else array
    return results


def op_of(average: bool | None, op: Reduction | None, *, stacklevel: int = 3) -> Reduction:
    """Returns the reduction that Horovod's two arguments of ``allreduce`` select: the average, if neither is given.

    Args:
        average: deprecated.
        op: its successor.
        stacklevel: what the warning points at: by default the caller of the function that calls this one.

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
    text = "allreduce(average=…) is deprecated: use op=Average or op=Sum."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    return Reduction.AVERAGE if average else Reduction.SUM


def allgather(
    value: Any,
    *,
    axis: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    gradients: Gradients = Gradients.ADJOINT,
) -> Any:
    """Concatenates the ranks' arrays along one dimension, which may differ between ranks.

    Args:
        value: an array of any framework; a number counts as an array with one row. Inside ``jax.jit`` shapes must be
            known: there all ranks must contribute equally many rows.
        axis: the dimension.
        name: shown in errors.
        process_set: the participating ranks.
        gradients: the convention of its gradient.

    Raises:
        ConfigError: ``value`` has no such dimension.
    """
    return _allgather_all("allgather", [value], axis, name=name, process_set=process_set, gradients=gradients)[0]


def grouped_allgather(
    values: Sequence[Any],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    gradients: Gradients = Gradients.ADJOINT,
) -> list[Any]:
    """``allgather`` of several values in few messages: those of one framework need one host call.

    Args:
        values: arrays of any framework, or numbers, in the same order on every rank.
        name: shown in errors.
        process_set: the participating ranks.
        gradients: the convention of their gradients.

    Example:
        >>> import choros
        >>> choros.init()
        >>> grouped_allgather([[1.5], [[2.0], [3.0]]])
        [array([1.5]), array([[2.],
               [3.]])]
    """
    arrays = {index: _as_array(value) for index, value in enumerate(values)}
    results = list(values)
    for indices in _by_framework(arrays):
        gathered = _allgather_all(
            "grouped_allgather",
            [arrays[index] for index in indices],
            0,
            name=name,
            process_set=process_set,
            gradients=gradients,
        )
        for index, array in zip(indices, gathered, strict=True):
            results[index] = array
    return results


def _allgather_all(
    collective: str,
    values: Sequence[Any],
    axis: int,
    *,
    name: str | None,
    process_set: ProcessSet,
    gradients: Gradients,
) -> list[Any]:
    """``collective`` of values of one framework, in one call on the host."""
    arrays = [_as_array(value) for value in values]
    adapter = adapter_of(arrays[0])
    for index, array in enumerate(arrays):
        shape = adapter.spec(array).shape
        if not shape:
            arrays[index], shape = array[None], (1,)
        if not -len(shape) <= axis < len(shape):
            raise ConfigError(
                f"{collective}(axis={axis}): the array has the shape {shape}, which has no such dimension."
            )
    specs = [adapter.spec(array) for array in arrays]
    lengths = [spec.shape[axis] for spec in specs]
    size = process_set.communicator.size
    totals = [None if length is None or not adapter.static_shapes else length * size for length in lengths]
    axis %= len(specs[0].shape)
    factor = gradients.factor("allgather", size)
    return _allgather_along(collective, arrays, specs, axis, totals, name=name, process_set=process_set, factor=factor)


def _allgather_along(
    collective: str,
    arrays: Sequence[Any],
    specs: Sequence[ArraySpec],
    axis: int,
    totals: Sequence[int | None],
    *,
    name: str | None,
    process_set: ProcessSet,
    factor: float = 1.0,
) -> list[Any]:
    """``collective`` of ``arrays``, which have ``specs``; ``totals`` are the results' extents along ``axis``, if known.

    ``factor`` is that of the adjoint in the gradient.
    """
    communicator = process_set.communicator
    adapter = adapter_of(arrays[0])
    extents = [
        adapter.extent(array, axis) if spec.shape[axis] is None else spec.shape[axis]
        for array, spec in zip(arrays, specs, strict=True)
    ]

    def gather(hosts: Sequence[Array]) -> Sequence[Array]:
        rows = [_rows_of(host, axis) for host in hosts]
        if collective == "allgather":
            gathered = [communicator.allgather(rows[0], name=name or "")]
        else:
            gathered = communicator.grouped_allgather(rows, name=name or "")
        return [_with_rows(array, axis) for array in gathered]

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        floats = [index for index, spec in enumerate(specs) if _is_floating(spec)]
        reduced = _reduce_own_rows(
            [gradients[index] for index in floats],
            [extents[index] for index in floats],
            axis,
            name=_gradient_of(name, collective),
            process_set=process_set,
        )
        results = dict(zip(floats, reduced, strict=True))
        return [_times(results[index], factor) if index in results else None for index in range(len(specs))]

    outputs = [
        ArraySpec(_replaced(spec.shape, axis, total), spec.dtype) for spec, total in zip(specs, totals, strict=True)
    ]
    return _host_call(adapter, gather, arrays, outputs, backward)


def _reduce_own_rows(
    values: Sequence[Any], extents: Sequence[Any], axis: int, *, name: str, process_set: ProcessSet
) -> list[Any]:
    """The adjoint of ``allgather``: the sums over the ranks of this rank's rows, ``extents``, in their ``values``.

    With the sums ranks learn where their rows begin, so that it is one collective, in which joined ranks take part.
    """
    communicator = process_set.communicator
    adapter = adapter_of(values[0])
    specs = [adapter.spec(value) for value in values]
    computed = [extent for extent in extents if not isinstance(extent, int)]

    def reduce(hosts: Sequence[Array]) -> Sequence[Array]:
        rest = iter(hosts[len(values) :])
        table = np.zeros((communicator.size, len(values)), np.int64)
        table[communicator.rank] = own = [extent if isinstance(extent, int) else int(next(rest)) for extent in extents]
        table, *sums = communicator.grouped_allreduce([table, *hosts[: len(values)]], Reduction.SUM, name=name)
        starts = table[: communicator.rank].sum(0)
        return [
            total[(slice(None),) * axis + (slice(start, start + extent),)].copy()
            for total, start, extent in zip(sums, starts, own, strict=True)
        ]

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        totals = [spec.shape[axis] for spec in specs]
        gathered = _allgather_along(
            "grouped_allgather",
            gradients,
            outputs,
            axis,
            totals,
            name=_gradient_of(name, "allgather"),
            process_set=process_set,
        )
        return [*gathered, *(None for _ in computed)]

    outputs = [
        ArraySpec(_replaced(spec.shape, axis, extent if isinstance(extent, int) else None), spec.dtype)
        for spec, extent in zip(specs, extents, strict=True)
    ]
    return _host_call(adapter, reduce, [*values, *computed], outputs, backward)


def broadcast(
    value: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    gradients: Gradients = Gradients.ADJOINT,
) -> Any:
    """Sends the ``value`` of ``root_rank`` to every rank.

    Args:
        value: an array of any framework, or a number; of the same shape and dtype on every rank.
        root_rank: a *global* rank, also within a process set (as in Horovod).
        name: shown in errors.
        process_set: the participating ranks.
        gradients: the convention of its gradient.
    """
    communicator = process_set.communicator
    root = root_index(root_rank, process_set)
    factor = gradients.factor("broadcast", communicator.size)

    def backward(upstream: Sequence[Any]) -> Sequence[Any]:
        gradient_name = _gradient_of(name, "broadcast")
        return [_times(_reduce_to_root(upstream[0], root_rank, name=gradient_name, process_set=process_set), factor)]

    def send(host: Array) -> Array:
        return communicator.broadcast(host, root, name=name or "")

    return _call(send, value, backward)


def _reduce_to_root(value: Any, root_rank: int, *, name: str, process_set: ProcessSet) -> Any:
    """The adjoint of ``broadcast``: the sum of all ranks' values on the root, zeros on the other ranks."""
    communicator = process_set.communicator
    is_root = communicator.rank == root_index(root_rank, process_set)

    def reduce(host: Array) -> Array:
        total = communicator.allreduce(host, Reduction.SUM, name=name)
        return total if is_root else np.zeros_like(total)

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        return [broadcast(gradients[0], root_rank, name=_gradient_of(name, "broadcast"), process_set=process_set)]

    return _call(reduce, value, backward)


def broadcast_arrays(
    arrays: Sequence[Array],
    root_rank: int,
    *,
    names: Sequence[str],
    process_set: ProcessSet = global_process_set,
    heirs: Sequence[int] = (),
) -> list[Array]:
    """``broadcast`` of several host arrays, each with its name.

    Args:
        arrays: see ``broadcast``.
        root_rank: likewise.
        names: the arrays' names.
        process_set: see ``broadcast``.
        heirs: the ranks, as the launcher numbers them, of which the first one that is left sends if the root is lost.
    """
    communicator = process_set.communicator
    senders = [communicator.launched[root_index(root_rank, process_set)], *heirs]
    # Not together: ranks that have joined take part in one collective at a time.
    return [
        communicator.broadcast(array, communicator.first_left(senders, "the sender of a broadcast"), name=name)
        for array, name in zip(arrays, names, strict=True)
    ]


def reducescatter(
    value: Any,
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
    gradients: Gradients = Gradients.ADJOINT,
) -> Any:
    """Reduces ``value`` over the ranks and returns this rank's rows; the first ranks get the remainder.

    Args:
        value: an array of any framework with at least one dimension, of the same shape on every rank.
        op: the reduction, except Adasum.
        name: shown in errors.
        prescale_factor: as for ``allreduce``.
        postscale_factor: likewise.
        compression: likewise.
        process_set: the participating ranks.
        gradients: the convention of its gradient.
    """
    scaling = Scaling(Reduction(op), prescale_factor, postscale_factor, compression)
    (own,) = _reducescatter_all("reducescatter", [_as_array(value)], scaling, name, process_set, gradients)
    return own


def grouped_reducescatter(
    values: Sequence[Any],
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
    gradients: Gradients = Gradients.ADJOINT,
) -> list[Any]:
    """``reducescatter`` of several values in few messages: those of one framework need one host call.

    Args:
        values: arrays of any framework, the same on every rank, in the same order.
        op: as for ``reducescatter``.
        name: shown in errors.
        prescale_factor: as for ``allreduce``.
        postscale_factor: likewise.
        compression: likewise.
        process_set: the participating ranks.
        gradients: the convention of their gradients.

    Example:
        >>> import choros
        >>> choros.init()
        >>> grouped_reducescatter([[1.5], [2.0, 3.0]], Reduction.SUM)
        [array([1.5]), array([2., 3.])]
    """
    scaling = Scaling(Reduction(op), prescale_factor, postscale_factor, compression)
    arrays = {index: _as_array(value) for index, value in enumerate(values)}
    results = list(values)
    for indices in _by_framework(arrays):
        group = [arrays[index] for index in indices]
        own = _reducescatter_all("grouped_reducescatter", group, scaling, name, process_set, gradients)
        for index, array in zip(indices, own, strict=True):
            results[index] = array
    return results


def _reducescatter_all(
    collective: str,
    arrays: Sequence[Any],
    scaling: Scaling,
    name: str | None,
    process_set: ProcessSet,
    gradients: Gradients,
) -> list[Any]:
    """``collective`` of arrays of one framework, in one call on the host."""
    communicator = process_set.communicator
    adapter = adapter_of(arrays[0])
    specs = [adapter.spec(array) for array in arrays]
    totals = [spec.shape[0] if spec.shape else 0 for spec in specs]
    outputs = []
    for spec, total in zip(specs, totals, strict=True):
        own = None
        if total is not None:
            start, end = shard_range(total, communicator.rank, communicator.size)
            own = end - start
        outputs.append(ArraySpec((own, *spec.shape[1:]), spec.dtype))

    def scatter(hosts: Sequence[Array]) -> Sequence[Array]:
        return scaling.reducescatter(communicator, collective, hosts, name=name or "")

    def backward(upstream: Sequence[Any]) -> Sequence[Any]:
        _check_linear(collective, scaling.op)
        floats = [index for index, spec in enumerate(specs) if _is_floating(spec)]
        factor = scaling.factor * gradients.factor("reducescatter", communicator.size)
        gathered = _allgather_along(
            "grouped_allgather",
            [upstream[index] for index in floats],
            [outputs[index] for index in floats],
            0,
            [totals[index] for index in floats],
            name=_gradient_of(name, collective),
            process_set=process_set,
        )
        results = dict(zip(floats, gathered, strict=True))
        mean = communicator.size if scaling.op is Reduction.AVERAGE else 1
        return [_times(results[index], factor / mean) if index in results else None for index in range(len(specs))]

    return _host_call(adapter, scatter, arrays, outputs, backward)


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
        ArraySpec((communicator.size,), np.dtype(np.int32), batched=False),
    ]

    def exchange(hosts: Sequence[Array]) -> Sequence[Array]:
        return communicator.alltoall(hosts[0], hosts[1] if len(hosts) > 1 else None, name=name or "")

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradient, received_counts = gradients
        gradient_name = _gradient_of(name, "alltoall")
        if rows is not None:
            return [alltoall(gradient, name=gradient_name, process_set=process_set)]
        returned = _return_rows(gradient, received_counts, splits, extent, name=gradient_name, process_set=process_set)
        return [returned, *(None for _ in inputs[1:])]

    first = spec.shape[0] if spec.shape else 0
    extent = adapter.extent(array, 0) if first is None else first
    inputs = [array] if splits is None else [array, _converted(splits, array)]
    received, counts = _host_call(adapter, exchange, inputs, outputs, backward)
    return received if splits is None else (received, counts)


def _return_rows(value: Any, counts: Any, splits: Any, extent: Any, *, name: str, process_set: ProcessSet) -> Any:
    """The adjoint of ``alltoall`` of ``extent`` rows by ``splits``: rows go back; for those that stayed it is zero."""
    communicator = process_set.communicator
    adapter = adapter_of(value)
    spec = adapter.spec(value)
    computed = [] if isinstance(extent, int) else [extent]

    def exchange(hosts: Sequence[Array]) -> Sequence[Array]:
        returned, _ = communicator.alltoall(hosts[0], hosts[1], name=name)
        padded = np.zeros((int(hosts[2]) if computed else extent, *returned.shape[1:]), returned.dtype)
        padded[: len(returned)] = returned
        return [padded]

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        sent = alltoall(gradients[0], splits, name=_gradient_of(name, "alltoall"), process_set=process_set)
        return [sent if splits is None else sent[0], None, *(None for _ in computed)]

    output = ArraySpec((None if computed else extent, *spec.shape[1:]), spec.dtype)
    (result,) = _host_call(adapter, exchange, [value, counts, *computed], [output], backward)
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    process_set.communicator.barrier()


def _converted(value: Any, like: Any) -> Any:
    adapter = adapter_of(like)
    return value if adapter_of(value) is adapter else adapter.from_host(np.asarray(value), like)


def root_index(root_rank: int, process_set: ProcessSet) -> int:
    if root_rank not in process_set.communicator.ranks:
        raise ConfigError(f"root_rank={root_rank} is not one of the participating ranks {process_set.ranks}.")
    return process_set.communicator.ranks.index(root_rank)


def _averageable(value: Any, op: Reduction) -> Any:
    """Converts Python integers to floats for an average."""
    return float(value) if op is Reduction.AVERAGE and isinstance(value, (bool, int)) else value


def _as_array(value: Any) -> Any:
    """Converts numbers and lists to arrays, for collectives that always return arrays."""
    return np.asarray(value) if isinstance(value, (bool, int, float, list, tuple)) else value


def _by_framework(arrays: Mapping[int, Any]) -> list[list[int]]:
    """The keys of the arrays of each framework."""
    groups: dict[ArrayAdapter, list[int]] = {}
    for index, array in arrays.items():
        groups.setdefault(adapter_of(array), []).append(index)
    return list(groups.values())


def _times(array: Any, factor: float) -> Any:
    return array if factor == 1.0 else array * factor


def _rows_of(host: Array, axis: int) -> Array:
    """The array with dimension ``axis`` moved to the front."""
    return host if axis == 0 else np.ascontiguousarray(np.moveaxis(host, axis, 0))


def _with_rows(rows: Array, axis: int) -> Array:
    """The inverse of ``_rows_of``."""
    return rows if axis == 0 else np.ascontiguousarray(np.moveaxis(rows, 0, axis))


def _replaced(shape: tuple[int | None, ...], axis: int, extent: int | None) -> tuple[int | None, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _is_floating(spec: ArraySpec) -> bool:
    return spec.dtype == BFLOAT16 or spec.dtype.kind == "f"


def _is_batch(host: Array, spec: ArraySpec) -> bool:
    """Whether ``host`` has one more dimension than the array has, as under ``jax.vmap``."""
    return host.ndim > len(spec.shape)


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
