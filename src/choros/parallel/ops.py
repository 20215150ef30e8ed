"""The collectives on any framework's arrays, with Horovod's names, and their gradients.

The gradient of a linear collective is its adjoint, which is that of the sum of all ranks' losses; in Horovod's
APIs it is Horovod's, which differs by a factor for three collectives (n is the number of ranks)::

    collective                 adjoint                                                        ``horovod_gradients``
    allreduce (sum, average)   allreduce, with the same factors                               the same
    allreduce (other ops)      none, which is an error                                        allreduce, the same op
    allgather                  the sum of all ranks' gradients of this rank's rows            their average: 1/n
    broadcast                  the root gets the sum of all ranks' gradients, others zeros    their average: 1/n
    reducescatter              allgather, with the same factors, and 1/n if it averages       n times as much
    alltoall                   alltoall, back to the ranks that sent the rows                 the same

The backward pass is a collective, too: all ranks must compute the gradient, or none. Integers have none. Horovod's of
minima, maxima, products and Adasum is not the derivative; a reducescatter with them has none in either convention.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from choros.arrays import ArraySpec, adapter_of
from choros.comm import Array, ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError, UnsupportedError
from choros.parallel.calls import (
    CollectiveCall,
    Options,
    as_array,
    of_each_framework,
    of_floating,
    on_host,
    on_host_alike,
    times,
)
from choros.parallel.compression.compressor import is_floating
from choros.topology import shard_range

#: The operations that have a gradient.
_LINEAR = (Reduction.SUM, Reduction.AVERAGE)


def allreduce(value: Any, op: Reduction = Reduction.AVERAGE, **options: Unpack[Options]) -> Any:
    """Reduces ``value`` over the ranks, each of which receives the result; rows of sparse gradients are gathered.

    >>> import choros
    >>> choros.init()
    >>> allreduce(3)
    3.0
    """
    return _reduce_values(CollectiveCall("allreduce", op, **options), [value])[0]


def grouped_allreduce(
    values: Sequence[Any], op: Reduction = Reduction.AVERAGE, **options: Unpack[Options]
) -> list[Any]:
    """``allreduce`` of values in one message, those of one framework by one host call; sparse ones in their own.

    >>> import choros
    >>> choros.init()
    >>> grouped_allreduce([1.5, [2.0, 3.0]], Reduction.SUM)
    [1.5, array([2., 3.])]
    """
    return _reduce_values(CollectiveCall("grouped_allreduce", op, **options), values)


def _reduce_values(call: CollectiveCall, given: Iterable[Any]) -> list[Any]:
    """``call`` with values of any frameworks, dense or sparse; the average of Python integers is a float."""
    values = list(given)
    results = list(values)
    dense = []
    for index, value in enumerate(values):
        rows = adapter_of(value).rows_of(value)  # AutoGraph, which reads this in a tf.function, has no walrus
        if rows is not None:
            results[index] = _gather_rows(rows, call)
            continue
        dense.append(index)
        if call.op is Reduction.AVERAGE and isinstance(value, (bool, int)):
            results[index] = float(value)
    reduced = of_each_framework([results[index] for index in dense], lambda arrays: _allreduce_all(call, arrays))
    for index, array in zip(dense, reduced, strict=True):
        results[index] = array.item() if isinstance(values[index], (bool, int, float)) else array
    return results


def _allreduce_all(call: CollectiveCall, values: Sequence[Any]) -> list[Any]:
    """``call`` with dense values of one framework, in one call on the host."""
    adapter = adapter_of(values[0])
    specs = [adapter.spec(value) for value in values]

    def reduce(hosts: Sequence[Array]) -> Sequence[Array]:
        batches = any(host.ndim > len(spec.shape) for host, spec in zip(hosts, specs, strict=True))
        if call.op is Reduction.ADASUM and batches:
            raise ConfigError("op=Adasum combines whole arrays: it cannot be used under jax.vmap.")
        return call.reduce(hosts)

    def backward(upstream: Sequence[Any]) -> Sequence[Any]:
        if not call.horovod_gradients:
            _check_linear(call)

        def reduced(indices: list[int]) -> list[Any]:
            return _allreduce_all(call.of_gradient(), [upstream[index] for index in indices])

        return of_floating(specs, upstream, reduced)

    return on_host(adapter, reduce, values, specs, backward)


def _check_linear(call: CollectiveCall) -> None:
    """A ``ConfigError`` if a reduction whose gradient is needed has none."""
    if call.op not in _LINEAR:
        raise ConfigError(
            f"the gradient of {call.collective}(op={call.op.title}) is needed, which has none: use Sum or Average, or "
            "make its argument a constant (x.detach(), tf.stop_gradient(x), jax.lax.stop_gradient(x))."
        )


def _gather_rows(rows: tuple[Any, Any, Any], call: CollectiveCall) -> Any:
    """``allreduce`` of a sparse gradient: all ranks' rows, scaled."""
    if call.op not in _LINEAR:
        raise UnsupportedError(
            f"allreduce(op={call.op.title}): the rows of a sparse gradient (IndexedSlices) are gathered, which is "
            "their sum: use Sum or Average, or make it dense."
        )
    indices, values, shape = rows
    adapter = adapter_of(values)
    dtype = adapter.spec(values).dtype
    if not is_floating(dtype):
        if call.scale != 1.0:
            raise UnsupportedError(
                f"allreduce: sparse gradients (IndexedSlices) of {dtype} cannot be scaled: cast them to float32."
            )
        if call.op is Reduction.AVERAGE:
            dtype = np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    elif call.scale != 1.0:
        values = values * call.scale
    wire = call.compression.row_dtype(dtype)
    sent = [adapter.cast(values, wire), indices]
    specs = [ArraySpec((None, *adapter.spec(each).shape[1:]), adapter.spec(each).dtype) for each in sent]
    gathering = replace(call, collective="grouped_allgather")
    summed = f"op={call.op.title} {call.scaled_by}".rstrip()
    values, indices, size = _allgather_along(gathering, sent, specs, 0, [None, None], summed=summed)
    values = adapter.cast(values, dtype)
    if call.op is Reduction.AVERAGE:
        values = values / adapter.cast(size, dtype)
    return adapter.from_rows(indices, values, shape)


def allgather(value: Any, *, axis: int = 0, **options: Unpack[Options]) -> Any:
    """Concatenates the ranks' arrays along a dimension, which may differ between ranks, but not inside ``jax.jit``."""
    call = CollectiveCall("allgather", **options)
    return _allgather_all(call, [as_array(value)], axis)[0]


def grouped_allgather(values: Sequence[Any], **options: Unpack[Options]) -> list[Any]:
    """``allgather`` of several values in few messages: those of one framework need one host call.

    >>> import choros
    >>> choros.init()
    >>> grouped_allgather([[1.5], [[2.0], [3.0]]])
    [array([1.5]), array([[2.],
           [3.]])]
    """
    call = CollectiveCall("grouped_allgather", **options)
    return of_each_framework(values, lambda arrays: _allgather_all(call, arrays, 0))


def _allgather_all(call: CollectiveCall, arrays: Sequence[Any], axis: int) -> list[Any]:
    """``call`` with arrays of one framework, in one call on the host."""
    arrays = list(arrays)
    adapter = adapter_of(arrays[0])
    for index, array in enumerate(arrays):
        shape = adapter.spec(array).shape
        if not shape:
            arrays[index], shape = array[None], (1,)
        if not -len(shape) <= axis < len(shape):
            raise ConfigError(
                f"{call.collective}(axis={axis}): the array has the shape {shape}, which has no such dimension."
            )
    specs = [adapter.spec(array) for array in arrays]
    lengths = [spec.shape[axis] for spec in specs]
    size = call.communicator.size
    totals = [None if length is None or not adapter.static_shapes else length * size for length in lengths]
    return _allgather_along(call, arrays, specs, axis % len(specs[0].shape), totals, call.gradient_factor)


def _allgather_along(
    call: CollectiveCall,
    arrays: Sequence[Any],
    specs: Sequence[ArraySpec],
    axis: int,
    totals: Sequence[int | None],
    factor: float = 1.0,
    summed: str = "",
) -> list[Any]:
    """``call`` with ``arrays``: ``totals`` are known extents along ``axis``, ``factor`` the gradient's; ``summed``:
    how the rows are summed, which ranks compare; then it returns the number of ranks, too, without those lost in it.
    """
    adapter, compared = adapter_of(arrays[0]), {"summed": summed} if summed else {}
    extents = [
        adapter.extent(array, axis) if spec.shape[axis] is None else spec.shape[axis]
        for array, spec in zip(arrays, specs, strict=True)
    ]

    def gather(hosts: Sequence[Array]) -> Sequence[Array]:
        rows = [np.ascontiguousarray(np.moveaxis(host, axis, 0)) for host in hosts]
        gathered = [np.ascontiguousarray(np.moveaxis(array, 0, axis)) for array in call.run(rows, **compared)]
        return [*gathered, np.array(call.communicator.size)] if summed else gathered

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradients = gradients[: len(arrays)]

        def reduced(indices: list[int]) -> list[Any]:
            given, own = [gradients[index] for index in indices], [extents[index] for index in indices]
            return [times(each, factor) for each in _reduce_own_rows(call.of_gradient(), given, own, axis)]

        return of_floating(specs, gradients, reduced)

    outputs = [
        ArraySpec(_replaced(spec.shape, axis, total), spec.dtype) for spec, total in zip(specs, totals, strict=True)
    ]
    outputs += [ArraySpec((), np.dtype(np.int64))] if summed else []
    return on_host(adapter, gather, arrays, outputs, backward)


def _reduce_own_rows(call: CollectiveCall, values: Sequence[Any], extents: Sequence[Any], axis: int) -> list[Any]:
    """The adjoint of ``allgather``, for joined ranks, too: one collective sums rows and tells where a rank's begin."""
    adapter = adapter_of(values[0])
    specs = [adapter.spec(value) for value in values]
    computed = [extent for extent in extents if not isinstance(extent, int)]

    def reduce(hosts: Sequence[Array]) -> Sequence[Array]:
        communicator, rest = call.communicator, iter(hosts[len(values) :])
        table = np.zeros((communicator.size, len(values)), np.int64)
        table[communicator.rank] = own = [extent if isinstance(extent, int) else int(next(rest)) for extent in extents]
        table, *sums = communicator.grouped_allreduce([table, *hosts[: len(values)]], Reduction.SUM, name=call.label)
        starts = table[: communicator.rank].sum(0)
        return [
            total[(slice(None),) * axis + (slice(start, start + extent),)].copy()
            for total, start, extent in zip(sums, starts, own, strict=True)
        ]

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        totals = [spec.shape[axis] for spec in specs]
        gathered = _allgather_along(call.of_gradient("grouped_allgather"), gradients, outputs, axis, totals)
        return [*gathered, *(None for _ in computed)]

    outputs = [
        ArraySpec(_replaced(spec.shape, axis, extent if isinstance(extent, int) else None), spec.dtype)
        for spec, extent in zip(specs, extents, strict=True)
    ]
    return on_host(adapter, reduce, [*values, *computed], outputs, backward)


def broadcast(value: Any, root_rank: int, **options: Unpack[Options]) -> Any:
    """Sends the ``value`` of ``root_rank``, a *global* rank also in a process set as in Horovod, to every rank."""
    call = CollectiveCall("broadcast", **options)
    root = root_index(root_rank, call.process_set)

    def backward(upstream: Sequence[Any]) -> Sequence[Any]:
        return [times(_reduce_to_root(call.of_gradient(), upstream[0], root_rank), call.gradient_factor)]

    return on_host_alike(lambda host: call.communicator.broadcast(host, root, name=call.label), value, backward)


def _reduce_to_root(call: CollectiveCall, value: Any, root_rank: int) -> Any:
    """The adjoint of ``broadcast``: the sum of all ranks' values on the root, zeros on the other ranks."""
    is_root = call.communicator.rank == root_index(root_rank, call.process_set)

    def reduce(host: Array) -> Array:
        total = call.communicator.allreduce(host, Reduction.SUM, name=call.label)
        return total if is_root else np.zeros_like(total)

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        name = call.of_gradient().name
        return [broadcast(gradients[0], root_rank, name=name, process_set=call.process_set)]

    return on_host_alike(reduce, value, backward)


def broadcast_arrays(
    arrays: Sequence[Array],
    root_rank: int,
    *,
    names: Sequence[str],
    process_set: ProcessSet = global_process_set,
    heirs: Sequence[int] | None = None,
) -> list[Array]:
    """``broadcast`` of named host arrays; if the root is lost, the first left of ``heirs``, or of all, sends it."""
    communicator = process_set.communicator
    heirs = communicator.launched if heirs is None else heirs
    senders = [communicator.launched[root_index(root_rank, process_set)], *heirs]
    # Not together: ranks that have joined take part in one collective at a time.
    return [
        communicator.broadcast(
            array, communicator.first_left(senders, "the sender of a broadcast"), name=name, heirs=heirs
        )
        for array, name in zip(arrays, names, strict=True)
    ]


def reducescatter(value: Any, op: Reduction = Reduction.AVERAGE, **options: Unpack[Options]) -> Any:
    """Reduces ``value`` and returns this rank's rows, of which the first ranks get the remainder; not for Adasum."""
    return _reducescatter_all(CollectiveCall("reducescatter", op, **options), [as_array(value)])[0]


def grouped_reducescatter(
    values: Sequence[Any], op: Reduction = Reduction.AVERAGE, **options: Unpack[Options]
) -> list[Any]:
    """``reducescatter`` of several values in few messages: those of one framework need one host call.

    >>> import choros
    >>> choros.init()
    >>> grouped_reducescatter([[1.5], [2.0, 3.0]], Reduction.SUM)
    [array([1.5]), array([2., 3.])]
    """
    call = CollectiveCall("grouped_reducescatter", op, **options)
    return of_each_framework(values, lambda arrays: _reducescatter_all(call, arrays))


def _reducescatter_all(call: CollectiveCall, arrays: Sequence[Any]) -> list[Any]:
    """``call`` with arrays of one framework, in one call on the host."""
    communicator = call.communicator
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

    def backward(upstream: Sequence[Any]) -> Sequence[Any]:
        _check_linear(call)
        factor = call.scale * call.gradient_factor / (communicator.size if call.op is Reduction.AVERAGE else 1)

        def gathered(indices: list[int]) -> list[Any]:
            given, of_rows = [upstream[index] for index in indices], [outputs[index] for index in indices]
            of_all = [totals[index] for index in indices]
            rows = _allgather_along(call.of_gradient("grouped_allgather"), given, of_rows, 0, of_all)
            return [times(each, factor) for each in rows]

        return of_floating(specs, upstream, gathered)

    return on_host(adapter, call.reduce, arrays, outputs, backward)


def alltoall(value: Any, splits: Any = None, **options: Unpack[Options]) -> Any:
    """Sends rows to every rank and returns those received; with ``splits``, also their number from each rank."""
    call = CollectiveCall("alltoall", **options)
    array = as_array(value)
    adapter = adapter_of(array)
    spec = adapter.spec(array)
    rows = spec.shape[0] if splits is None and adapter.static_shapes and spec.shape else None
    outputs = [
        ArraySpec((rows, *spec.shape[1:]), spec.dtype),
        ArraySpec((call.communicator.size,), np.dtype(np.int32), batched=False),
    ]

    def exchange(hosts: Sequence[Array]) -> Sequence[Array]:
        return call.communicator.alltoall(hosts[0], hosts[1] if len(hosts) > 1 else None, name=call.label)

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        gradient, received_counts = gradients
        if rows is not None:
            return [alltoall(gradient, name=call.of_gradient().name, process_set=call.process_set)]
        returned = _return_rows(call.of_gradient(), gradient, received_counts, splits, extent)
        return [returned, *(None for _ in inputs[1:])]

    first = spec.shape[0] if spec.shape else 0
    extent = adapter.extent(array, 0) if first is None else first
    inputs = [array] if splits is None else [array, _converted(splits, array)]
    received, counts = on_host(adapter, exchange, inputs, outputs, backward)
    return received if splits is None else (received, counts)


def _return_rows(call: CollectiveCall, value: Any, counts: Any, splits: Any, extent: Any) -> Any:
    """The adjoint of ``alltoall`` of ``extent`` rows by ``splits``: rows go back; for those that stayed it is zero."""
    adapter = adapter_of(value)
    spec = adapter.spec(value)
    computed = [] if isinstance(extent, int) else [extent]

    def exchange(hosts: Sequence[Array]) -> Sequence[Array]:
        returned, _ = call.communicator.alltoall(hosts[0], hosts[1], name=call.label)
        padded = np.zeros((int(hosts[2]) if computed else extent, *returned.shape[1:]), returned.dtype)
        padded[: len(returned)] = returned
        return [padded]

    def backward(gradients: Sequence[Any]) -> Sequence[Any]:
        sent = alltoall(gradients[0], splits, name=call.of_gradient().name, process_set=call.process_set)
        return [sent if splits is None else sent[0], None, *(None for _ in computed)]

    output = ArraySpec((None if computed else extent, *spec.shape[1:]), spec.dtype)
    (result,) = on_host(adapter, exchange, [value, counts, *computed], [output], backward)
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    CollectiveCall("barrier", process_set=process_set).communicator.barrier()


def _converted(value: Any, like: Any) -> Any:
    adapter = adapter_of(like)
    return value if adapter_of(value) is adapter else adapter.from_host(np.asarray(value), like)


def root_index(root_rank: int, process_set: ProcessSet) -> int:
    """The number of a rank of the job within the process set."""
    if root_rank not in process_set.communicator.ranks:
        raise ConfigError(f"root_rank={root_rank!r} is not one of the participating ranks {process_set.ranks}.")
    return process_set.communicator.ranks.index(root_rank)


def _replaced(shape: tuple[int | None, ...], axis: int, extent: int | None) -> tuple[int | None, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])
