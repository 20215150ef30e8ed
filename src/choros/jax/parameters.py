"""Broadcast of models and optimizer states, which are pytrees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from choros.comm import ProcessSet, global_process_set
from choros.errors import ConfigError
from choros.parallel.ops import broadcast_arrays

Array = NDArray[Any]
#: The types of leaves that are sent.
_SENT = (jax.Array, np.ndarray, np.generic, int, float)


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
        ConfigError: it was called inside ``jax.jit``.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters({"kernel": jnp.ones(2), "activation": "relu", "epoch": 3})
        {'activation': 'relu', 'epoch': 3, 'kernel': Array([1., 1.], dtype=float32)}
    """
    jax.effects_barrier()
    leaves, structure = jax.tree.flatten(tree)
    sent = [(path, index) for index, path in enumerate(paths_of(tree)) if isinstance(leaves[index], _SENT)]
    hosts = [_to_host(leaves[index]) for _, index in sent]
    names = [path for path, _ in sent]
    heirs = process_set.communicator.launched  # all ranks have such values
    received = broadcast_arrays(hosts, root_rank, names=names, process_set=process_set, heirs=heirs)
    for (_, index), host in zip(sent, received, strict=True):
        leaves[index] = _from_host(host, leaves[index])
    return structure.unflatten(leaves)


def paths_of(tree: Any) -> list[str]:
    """Returns the path of each leaf, such as ``['dense']['kernel']``, to show in errors."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _to_host(leaf: Any) -> Array:
    if isinstance(leaf, jax.core.Tracer):
        raise ConfigError(
            "broadcast_parameters was called inside jax.jit or another transformation: call it outside of it, once, "
            "before training. broadcast can be part of a compiled function."
        )
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _from_host(host: Array, like: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(host, impl=jax.random.key_impl(like))
    if isinstance(like, jax.Array):
        return jax.device_put(host, like.sharding if like.committed else None)
    if isinstance(like, np.ndarray):
        return host
    return type(like)(host.item())
