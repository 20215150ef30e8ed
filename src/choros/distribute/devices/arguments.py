"""The arguments of a function that replicas run, taken apart."""

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

__all__ = ["Pattern", "by_leaf", "taken_apart"]


class _Kind(enum.Enum):
    EACH = "a value for each replica"
    EVERY = "an array or a number that every replica gets"
    CONSTANT = "something else"


@final
@dataclass(frozen=True)
class Pattern:
    """What is left of arguments when the arrays have been taken out.

    Attributes:
        key: equal for arguments that one program serves, as long as the constants live.
    """

    tree: Any
    kinds: tuple[_Kind, ...]
    constants: tuple[Any, ...]
    key: Any

    def put_together(self, each: Sequence[Any], every: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of one replica, positional and by keyword."""
        sources: dict[_Kind, Iterator[Any]] = {
            _Kind.EACH: iter(each),
            _Kind.EVERY: iter(every),
            _Kind.CONSTANT: iter(self.constants),
        }
        args, kwargs = jax.tree.unflatten(self.tree, [next(sources[kind]) for kind in self.kinds])
        return args, kwargs


def taken_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Pattern, list[PerReplica], list[Any]]:
    """The pattern of arguments; their values for each replica; and their arrays and numbers for every replica.

    Raises:
        StrategyError: JAX is tracing them.
    """
    leaves, tree = jax.tree.flatten(by_leaf((tuple(args), dict(kwargs))))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, jnp.zeros(()))):
        raise StrategyError(
            "strategy.run was called within a function that JAX compiles or differentiates: it compiles what it runs "
            "by itself. Call it outside of jax.jit and jax.grad."
        )
    kinds, constants, each, every, key = [], [], [], [], []
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            kinds.append(_Kind.EACH)
            each.append(leaf)
            key.append(_spec(leaf.values[0]))
        elif _is_array(leaf):
            kinds.append(_Kind.EVERY)
            every.append(_array(leaf))
            key.append(_spec(leaf))
        else:
            kinds.append(_Kind.CONSTANT)
            constants.append(leaf)
            key.append(leaf if isinstance(leaf, (bool, str, bytes, enum.Enum)) else id(leaf))
    pattern = Pattern(tree, tuple(kinds), tuple(constants), (tree, tuple(kinds), tuple(key)))
    return pattern, each, every


def by_leaf(structure: Any) -> Any:
    """Every ``PerReplica`` of structures, such as batches, as a structure of ``PerReplica``."""

    def leaf_by_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) or all(isinstance(value, jax.Array) for value in leaf.values):
            return leaf
        return jax.tree.map(lambda *values: PerReplica([_array(value) for value in values]), *leaf.values)

    return jax.tree.map(leaf_by_leaf, structure)


def _is_array(leaf: Any) -> bool:
    """Also another framework's; a Keras variable has a value, but is none."""
    if isinstance(leaf, (int, float, complex)):
        return not isinstance(leaf, bool)
    return hasattr(leaf, "__array__") and not hasattr(leaf, "__jax_array__")


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, int, float, complex)) else np.asarray(leaf)


def _spec(array: Any) -> Any:
    return np.shape(array), getattr(array, "dtype", type(array))
