"""The collectives with Horovod's names, on pytrees, inside and outside of ``jax.jit``; under ``jax.vmap`` a batch is
one. Their gradients are their adjoints, as ``parallel/ops.py`` lists them: those of the sum of all ranks' losses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from choros.comm import Array, ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError
from choros.jax.division import refuse_slices
from choros.parallel import objects, ops
from choros.parallel.arguments import documented
from choros.parallel.calls import options_of
from choros.parallel.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

_TREE = "an array, a number, or a pytree of such, with the same shapes and dtypes on every rank."
_ROWS = (
    "an array, a number, which counts as an array with one row, or a pytree of such. Numbers of rows may differ "
    "between ranks, but not inside ``jax.jit``, which must know the shape of the result."
)
_OBJECT = "any object that cloudpickle supports."
#: The types of leaves of models and optimizer states that are sent.
_SENT = (jax.Array, np.ndarray, np.generic, int, float, complex)


@documented(tree=_TREE)
def allreduce(
    tree: Any,
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces every array of ``tree`` over the ranks, all in one message; averages by default.

    Returns:
        A pytree of new arrays with the same shapes and dtypes. The average of Python integers is a float.

    Raises:
        MismatchError: ranks have different shapes, dtypes or arguments. Inside ``jax.jit`` it is also a
            ``jax.errors.JaxRuntimeError``, and JAX raises it when the result is used.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd
        >>> hvd.init()
        >>> hvd.allreduce({"loss": jnp.ones(2), "count": 3}, hvd.Sum)
        {'count': Array(3, dtype=int32), 'loss': Array([1., 1.], dtype=float32)}
    """
    averaged = Reduction(op) is Reduction.AVERAGE
    values = jax.tree.map(lambda leaf: float(leaf) if averaged and isinstance(leaf, int) else leaf, tree)

    options = options_of(name, process_set, prescale_factor, postscale_factor, compression, horovod_gradients=False)
    return _of_tree(lambda arrays: ops.grouped_allreduce(arrays, op, **options), values)


@documented(tree=_ROWS)
def allgather(tree: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenates the ranks' arrays along the first dimension, in rank order.

    Example:
        >>> import jax, jax.numpy as jnp, choros.jax as hvd
        >>> hvd.init()
        >>> jax.jit(hvd.allgather)(jnp.ones((2, 1))).shape
        (2, 1)
    """
    return _of_tree(lambda arrays: ops.grouped_allgather(arrays, name=name, process_set=process_set), tree)


@documented(tree=_TREE)
def broadcast(
    tree: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the arrays of the global rank ``root_rank`` to every rank; differentiable.

    ``broadcast_parameters`` is for models and optimizer states, whose leaves need not be arrays.
    """

    def send(arrays: Sequence[Any]) -> Sequence[Any]:
        return [ops.broadcast(array, root_rank, name=name, process_set=process_set) for array in arrays]

    return _of_tree(send, tree)


@documented(tree=_TREE, op="``Average``, which is the default, ``Sum``, ``Min``, ``Max`` or ``Product``.")
def reducescatter(
    tree: Any,
    op: Reduction = Reduction.AVERAGE,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces every array of ``tree`` over the ranks and returns this rank's rows.

    If these are not divisible, the first ranks have one row more.
    """

    options = options_of(name, process_set, prescale_factor, postscale_factor, compression, horovod_gradients=False)
    return _of_tree(lambda arrays: ops.grouped_reducescatter(arrays, op, **options), tree)


#: Horovod's names; a list is a pytree.
grouped_allreduce = allreduce
grouped_allgather = allgather
grouped_reducescatter = reducescatter


@documented(array="an array with at least one dimension.")
def alltoall(
    array: Any, splits: Any = None, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rows of ``array`` to every rank and returns the rows that all ranks sent to this one.

    Returns:
        The received rows; with ``splits`` a pair of these and the number of rows from each rank.
    """
    return ops.alltoall(_array_of(array), splits, name=name, process_set=process_set)


@documented()
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it; not for compiled functions."""
    jax.effects_barrier()
    ops.barrier(process_set)


@documented(obj=f"{_OBJECT[:-1]}; ignored on other ranks.")
def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the Python object of ``root_rank`` to every rank; not for compiled functions.

    Returns:
        A copy of the object; on the root, ``obj`` itself.
    """
    jax.effects_barrier()
    return objects.broadcast_object(obj, root_rank, name, process_set)


@documented(obj=_OBJECT)
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the Python objects of all ranks, in rank order, on every rank; not for compiled functions."""
    jax.effects_barrier()
    return objects.allgather_object(obj, name, process_set)


def broadcast_parameters(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Returns ``tree`` with the arrays and numbers of ``root_rank``.

    Args:
        tree: any pytree with the same structure, shapes and dtypes on every rank: a dictionary of parameters, the state
            of an optax optimizer, an Equinox module, ``nnx.state(model)``. Leaves that are not arrays, keys of
            ``jax.random`` or numbers, such as functions, are returned as they are.
        root_rank: a global rank.
        process_set: the participating ranks.

    Returns:
        A new tree; ``tree`` is not changed. Arrays stay on their devices.

    Raises:
        MismatchError: ranks have different arrays; the text shows the first difference.
        ConfigError: it was called inside ``jax.jit``, or the state is that of ``distributed(tx, shard_state=True)``.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters({"kernel": jnp.ones(2), "activation": "relu", "epoch": 3})
        {'activation': 'relu', 'epoch': 3, 'kernel': Array([1., 1.], dtype=float32)}
    """
    jax.effects_barrier()
    refuse_slices(tree, "broadcast_parameters")
    leaves, structure = jax.tree.flatten(tree)
    sent = [(path, index) for index, path in enumerate(paths_of(tree)) if isinstance(leaves[index], _SENT)]
    hosts = [_to_host(leaves[index]) for _, index in sent]
    names = [path for path, _ in sent]
    received = ops.broadcast_arrays(hosts, root_rank, names=names, process_set=process_set)
    for (_, index), host in zip(sent, received, strict=True):
        leaves[index] = _from_host(host, leaves[index])
    return structure.unflatten(leaves)


def paths_of(tree: Any) -> list[str]:
    """Returns the path of each leaf, such as ``['dense']['kernel']``, to show in errors."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _of_tree(collective: Callable[[Sequence[Any]], Sequence[Any]], tree: Any) -> Any:
    """Applies ``collective`` to leaves as arrays: a number's would run while JAX traces, not equally often on ranks."""
    refuse_slices(tree, "a collective")
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(collective([*map(_array_of, leaves)]))


def _array_of(leaf: Any) -> Any:
    """``leaf`` as JAX has it, which cuts the integers of NumPy to 32 bits without a word."""
    array = jnp.asarray(leaf)
    is_cut = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "iu" and array.dtype != leaf.dtype
    if is_cut and (np.asarray(array) != leaf).any():
        raise ConfigError(
            f"an array of {leaf.dtype} has numbers that JAX's {array.dtype} cannot hold: set jax_enable_x64, or give "
            "floating-point numbers."
        )
    return array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _to_host(leaf: Any) -> Array:
    if isinstance(leaf, jax.core.Tracer):
        raise ConfigError(
            "broadcast_parameters was called inside jax.jit or another transformation: call it outside of it, once, "
            "before training. broadcast can be part of a compiled function."
        )
    host = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return host.reshape(-1).view(host.real.dtype) if np.iscomplexobj(host) else host


def _from_host(host: Array, like: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(host, impl=jax.random.key_impl(like))
    if np.iscomplexobj(like):
        host = host.view(np.result_type(host, np.complex64)).reshape(np.shape(like))
    if isinstance(like, jax.Array):
        return jax.device_put(host, like.sharding if like.committed else None)
    if isinstance(like, np.ndarray):
        return host
    return type(like)(host.item())
