"""The arguments of a function that replicas run, flattened for compilation."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.distribute.values import PerReplica
from choros.errors import StrategyError

__all__ = ["Pattern", "by_leaf", "flatten"]


class _LeafKind(enum.Enum):
    PER_REPLICA = "one value per replica"
    REPLICATED = "an array or a number that is replicated"
    CONSTANT = "any other object"


@final
@dataclass(frozen=True)
class Pattern:
    """The structure of arguments, without their arrays.

    Attributes:
        key: equal for arguments that one compiled step can serve, for the lifetime of the constants.
    """

    tree: Any
    kinds: tuple[_LeafKind, ...]
    constants: tuple[Any, ...]
    key: Any

    def unflatten(
        self, per_replica: Sequence[Any], replicated: Sequence[Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the arguments of one replica, positional and by keyword."""
        sources: dict[_LeafKind, Iterator[Any]] = {
            _LeafKind.PER_REPLICA: iter(per_replica),
            _LeafKind.REPLICATED: iter(replicated),
            _LeafKind.CONSTANT: iter(self.constants),
        }
        args, kwargs = jax.tree.unflatten(self.tree, [next(sources[kind]) for kind in self.kinds])
        return args, kwargs


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Pattern, list[PerReplica], list[Any]]:
    """Returns the pattern of the arguments, their per-replica values, and their replicated arrays and numbers.

    Raises:
        StrategyError: the arguments are being traced by JAX.
    """
    leaves, tree = jax.tree.flatten(by_leaf((tuple(args), dict(kwargs))))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, jnp.zeros(()))):
        raise StrategyError(
            "strategy.run was called within a function that JAX compiles or differentiates, but it compiles the "
            "function itself. Call it outside of jax.jit and jax.grad."
        )
    kinds, constants, per_replica, replicated, key = [], [], [], [], []
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            kinds.append(_LeafKind.PER_REPLICA)
            per_replica.append(leaf)
            key.append(_spec(leaf.values[0]))
        elif _is_array(leaf):
            kinds.append(_LeafKind.REPLICATED)
            replicated.append(_array(leaf))
            key.append(_spec(leaf))
        else:
            kinds.append(_LeafKind.CONSTANT)
            constants.append(leaf)
            key.append(leaf if isinstance(leaf, (bool, str, bytes, enum.Enum)) else id(leaf))
    pattern = Pattern(tree, tuple(kinds), tuple(constants), (tree, tuple(kinds), tuple(key)))
    return pattern, per_replica, replicated


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


def _spec(array: Any) -> Any:
    return np.shape(array), getattr(array, "dtype", type(array))
