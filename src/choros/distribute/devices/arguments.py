"""The arguments of a function that replicas run, flattened for compilation."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.distribute.types import PerReplica
from choros.errors import StrategyError


class _Given(enum.Enum):
    """What stands for an array among the leaves of a pattern."""

    PER_REPLICA = "one value per replica"
    REPLICATED = "an array or a number that is replicated"


@final
@dataclass(frozen=True)
class Pattern:
    """Arguments without their arrays; ``key`` is equal if one compiled step serves both, while the constants live."""

    tree: Any
    leaves: tuple[Any, ...]
    key: Any

    def unflatten(
        self, per_replica: Sequence[Any], replicated: Sequence[Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Returns the arguments of one replica, positional and by keyword."""
        arrays = {_Given.PER_REPLICA: iter(per_replica), _Given.REPLICATED: iter(replicated)}
        leaves = [next(arrays[leaf]) if isinstance(leaf, _Given) else leaf for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Pattern, list[PerReplica], list[Any]]:
    """Returns the arguments' pattern, per-replica values, and replicated ones; StrategyError if JAX is tracing them."""
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
            leaves.append(_Given.PER_REPLICA)
            per_replica.append(leaf)
            key.append((_Given.PER_REPLICA, *_spec(leaf.values[0])))
        elif _is_array(leaf):
            leaves.append(_Given.REPLICATED)
            replicated.append(_array(leaf))
            key.append((_Given.REPLICATED, *_spec(leaf)))
        else:
            leaves.append(leaf)
            key.append(leaf if isinstance(leaf, (bool, str, bytes, enum.Enum)) else id(leaf))
    return Pattern(tree, tuple(leaves), (tree, tuple(key))), per_replica, replicated


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
