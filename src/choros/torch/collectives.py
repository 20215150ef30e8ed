"""The collectives with the arguments of Horovod's PyTorch API; those that return new tensors have Horovod's gradients,
as in ``parallel/ops.py``. Each is defined once; the signatures and names of its variants follow from it::

    allreduce                            the definition
    _asynchronous(allreduce)             allreduce_async: starts it and returns a handle
    _in_place(allreduce)                 allreduce_: overwrites its first argument
    _asynchronous(_in_place(allreduce))  allreduce_async_
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from choros.arrays.torch_arrays import TorchArrays
from choros.comm import ProcessSet, Reduction, Work, global_process_set
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.arguments import documented, op_of
from choros.parallel.calls import options_of
from choros.parallel.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

P = ParamSpec("P")
T = TypeVar("T")
#: A variant of a collective that lacks one of its arguments.
_WithoutCompression = Callable[..., Any]


def _asynchronous(collective: Callable[P, T]) -> Callable[P, Work[T]]:
    """Returns the variant that starts on the communicator's thread and gives a handle."""
    base, run = collective.__name__.strip("_"), torch.no_grad()(collective)
    suffix = "_" if collective.__name__.endswith("_") else ""

    def start(arguments: dict[str, Any]) -> Work[T]:
        _finish_computing(next(iter(arguments.values())))
        process_set: ProcessSet = arguments["process_set"]
        return process_set.communicator.start(arguments["name"] or "", run, **arguments)

    return _variant(
        collective,
        start,
        f"{base}_async{suffix}",
        f"Starts ``{base}{suffix}`` and returns a handle, whose result ``synchronize`` returns.\n\n"
        "Its arguments must not be changed until then. It is not differentiable.",
    )


def _in_place(collective: Callable[P, T]) -> Callable[P, T]:
    """Returns the variant that overwrites its first argument, of the result's shape."""
    base: Any = collective

    def overwrite(arguments: dict[str, Any]) -> Any:
        first = next(iter(arguments.values()))
        return first if _reduced_there(arguments) else _overwrite(first, base(**arguments))

    summary = f"``{base.__name__}`` that overwrites its first argument, and returns it."
    return _variant(collective, overwrite, f"{base.__name__}_", summary)


def _variant(
    collective: Callable[P, Any], function: Callable[[dict[str, Any]], T], name: str, summary: str
) -> Callable[P, T]:
    """``function`` of all arguments of ``collective`` by name but ``compression``, which no variant has in Horovod."""
    signature = inspect.signature(collective)
    kept = [each for each in signature.parameters.values() if each.name != "compression"]
    signature = signature.replace(parameters=kept)

    @functools.wraps(collective)
    def variant(*args: P.args, **kwargs: P.kwargs) -> T:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = dict(call.arguments)
        if "tensors" in arguments:  # it may be an iterator, and is read more than once
            arguments["tensors"] = list(arguments["tensors"])
        if arguments.get("average") is not None:
            # Now, because the warning points at the caller, who is not on another thread's stack.
            arguments["op"] = op_of(arguments["average"], arguments["op"])
            arguments["average"] = None
        return function(arguments)

    variant.__signature__ = signature  # type: ignore[attr-defined]
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = summary
    return documented()(variant)


def _finish_computing(tensors: Any) -> None:
    """Waits for the streams that compute ``tensors``: the other thread uses another one, which does not."""
    for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
        if torch.is_tensor(tensor) and tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)


def _overwrite(tensor: Any, value: Any) -> Any:
    if not torch.is_tensor(tensor):
        return [_overwrite(each, new) for each, new in zip(tensor, value, strict=True)]
    # The mode in which a tensor was made is that of a thread, and this one may be another.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        return tensor.copy_(value)


def _reduced_there(arguments: dict[str, Any]) -> bool:
    """Reduces tensors in their own memory, if they are of floating-point numbers in the host's, and share it with no
    other; returns whether it did. Other ranks may do the same by ``_overwrite``: the collective is the same.
    """
    if "op" not in arguments:
        return False
    first, op = next(iter(arguments.values())), op_of(arguments["average"], arguments["op"])
    tensors = first if isinstance(first, (list, tuple)) else [first]
    factors = arguments["prescale_factor"], arguments["postscale_factor"]
    if op is Reduction.ADASUM or factors != (1.0, 1.0) or not tensors:
        return False
    if not all(torch.is_tensor(each) and each.dtype in {torch.float32, torch.float64} for each in tensors):
        return False
    if not TorchArrays.own_host_memory(tensors):
        return False
    communicator, name = arguments["process_set"].communicator, arguments["name"] or ""
    arrays = [tensor.detach().numpy() for tensor in tensors]
    if tensors is first:
        communicator.grouped_allreduce(arrays, op, name=name, out=arrays)
    else:
        communicator.allreduce(arrays[0], op, name=name, out=arrays[0])
    torch.autograd.graph.increment_version(tensors)  # autograd detects what it has saved and others have changed
    return True


@documented()
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces ``tensor``, of the same shape on every rank, over the ranks; averages by default.

    The rows of a sparse tensor are gathered, which is their sum.

    Its gradient is the same allreduce of the gradients. With ``Min``, ``Max``, ``Product`` or ``Adasum`` that is what
    Horovod computes, not the derivative.

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
    options = options_of(name, process_set, prescale_factor, postscale_factor, compression)
    return ops.allreduce(tensor, op_of(average, op), **options)


allreduce_: _WithoutCompression = _in_place(allreduce)
allreduce_async: _WithoutCompression = _asynchronous(allreduce)
allreduce_async_: _WithoutCompression = _asynchronous(allreduce_)


@documented()
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """``allreduce`` of several tensors, in as few messages as possible."""
    options = options_of(name, process_set, prescale_factor, postscale_factor, compression)
    return ops.grouped_allreduce(tensors, op_of(average, op), **options)


grouped_allreduce_: _WithoutCompression = _in_place(grouped_allreduce)
grouped_allreduce_async: _WithoutCompression = _asynchronous(grouped_allreduce)
grouped_allreduce_async_: _WithoutCompression = _asynchronous(grouped_allreduce_)


@documented()
def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' tensors along the first dimension, which may differ between ranks."""
    return ops.allgather(tensor, name=name, process_set=process_set, horovod_gradients=True)


@documented()
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """``allgather`` of several tensors."""
    return ops.grouped_allgather(tensors, name=name, process_set=process_set, horovod_gradients=True)


allgather_async = _asynchronous(allgather)
grouped_allgather_async = _asynchronous(grouped_allgather)


@documented()
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the ``tensor`` of ``root_rank`` to every rank; all have the same shape."""
    return ops.broadcast(tensor, root_rank, name=name, process_set=process_set, horovod_gradients=True)


broadcast_ = _in_place(broadcast)
broadcast_async = _asynchronous(broadcast)
broadcast_async_ = _asynchronous(broadcast_)


@documented()
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of ``tensor`` to every rank and returns the rows that all ranks sent to this one.

    Returns:
        The received rows; with ``splits`` a pair of these and the number of rows from each rank.
    """
    return ops.alltoall(tensor, splits, name=name, process_set=process_set)


alltoall_async = _asynchronous(alltoall)


@documented(op="the reduction, not ``Adasum``.")
def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces ``tensor`` over the ranks and returns this rank's rows; the first ranks get the remainder."""
    options = options_of(name, process_set, prescale_factor, postscale_factor, compression)
    return ops.reducescatter(tensor, op, **options)


reducescatter_async: _WithoutCompression = _asynchronous(reducescatter)


@documented(op="the reduction, not ``Adasum``.")
def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction = Reduction.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """``reducescatter`` of several tensors."""
    options = options_of(name, process_set, prescale_factor, postscale_factor, compression)
    return ops.grouped_reducescatter(tensors, op, **options)


grouped_reducescatter_async: _WithoutCompression = _asynchronous(grouped_reducescatter)


@documented(tensor="a sparse tensor (``torch.sparse_coo``).", op="``Average`` or ``Sum``.")
def sparse_allreduce_async(
    tensor: Any, name: str | None, op: Reduction, process_set: ProcessSet = global_process_set
) -> Callable[[], Any]:
    """Starts an allreduce of a sparse tensor: its rows are gathered, which is their sum.

    Returns:
        A function that waits for the collective, and returns the reduced sparse tensor.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> rows = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
        >>> hvd.sparse_allreduce_async(rows, "rows", hvd.Sum)().to_dense()
        tensor([0., 5., 0., 0.])
    """
    if not tensor.is_sparse:
        raise ConfigError("sparse_allreduce_async takes a sparse tensor: pass dense ones to allreduce_async.")
    handle: Work[Any] = allreduce_async(tensor, None, name, op, process_set=process_set)
    return handle.wait


def synchronize(handle: Work[T]) -> T:
    """Waits for the collective that ``…_async`` started; returns its result or raises its error."""
    return handle.wait()


def poll(handle: Work[Any]) -> bool:
    """Returns whether the collective is done, so that ``synchronize`` does not wait."""
    return handle.done()
