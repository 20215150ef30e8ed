"""The arguments of a function that replicas run, flattened for compilation."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from choros.distribute.types import PerReplica
from choros.errors import StrategyError

#: What stands for one value per replica, and for an array or number that is replicated, in a pattern of arguments.
_PER_REPLICA, _REPLICATED = object(), object()

#: Returns a replica's arguments, positional and by keyword, of its own values and the replicated ones.
Unflatten = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Unflatten, Any, list[PerReplica], list[Any]]:
    """Returns what restores the arguments, a key, per-replica values, and replicated ones. The key is equal if one
    compiled step serves both, while the constants live. StrategyError if JAX is tracing the arguments.
    """
    given, tree = jax.tree.flatten(by_leaf((tuple(args), dict(kwargs))))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in (*given, jnp.zeros(()))):
        raise StrategyError(
            "strategy.run was called within a function that JAX compiles or differentiates, but it compiles the "
            "function itself. Call it outside of jax.jit and jax.grad."
        )
    leaves: list[Any] = []
    key: list[Any] = []
    per_replica: list[PerReplica] = []
    replicated: list[Any] = []
    for leaf in given:
        if isinstance(leaf, PerReplica):
            leaves.append(_PER_REPLICA)
            per_replica.append(leaf)
            key.append((_PER_REPLICA, *_spec(leaf.values[0])))
        elif _is_array(leaf):
            leaves.append(_REPLICATED)
            replicated.append(_array(leaf))
            key.append((_REPLICATED, *_spec(leaf)))
        else:
            leaves.append(leaf)
            key.append(leaf if isinstance(leaf, (bool, str, bytes, enum.Enum)) else id(leaf))

    def unflatten(own: Sequence[Any], shared: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        arrays = {id(_PER_REPLICA): iter(own), id(_REPLICATED): iter(shared)}
        restored = [next(arrays[id(leaf)]) if id(leaf) in arrays else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, restored)
        return args, kwargs

    return unflatten, (tree, tuple(key)), per_replica, replicated


def by_leaf(structure: Any) -> Any:
    """Replaces every ``PerReplica`` of structures, such as batches, by a structure of ``PerReplica`` leaves."""

    def leaf_by_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) or all(isinstance(value, jax.Array) for value in leaf.values):
            return leaf
        return jax.tree.map(lambda *values: PerReplica([_array(value) for value in values]), *leaf.values)

    return jax.tree.map(leaf_by_leaf, structure)


def _is_array(leaf: Any) -> bool:
    """Whether ``leaf`` is an array of any framework; a Keras variable has a value, but is not an array."""
    if isinstance(leaf, (int, float, complex)):
        return not isinstance(leaf, bool)
    return hasattr(leaf, "__array__") and not hasattr(leaf, "__jax_array__")


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, int, float, complex)) else np.asarray(leaf)


def _spec(array: Any) -> tuple[Any, ...]:
    return np.shape(array), getattr(array, "dtype", type(array))
