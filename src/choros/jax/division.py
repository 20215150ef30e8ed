"""How parameters are divided among ranks, and the state of the slices of one of them.

A tree of slices has ``optax.MaskedNode()`` for an array of which the rank has none, as the trees of ``optax.masked``
do, so that masks and labels apply to it as to the whole tree. A slice has as many dimensions as its array.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.comm import DType
from choros.errors import ConfigError
from choros.parallel.reduce.gradients import GradientKind, Ranges
from choros.parallel.reduce.slices import even_slices, whole_slices

#: What to do with files.
FILES = (
    "On the ranks that have saved a state, whole_state(tx, state, params) makes it that of one process, and "
    "own_state(tx, whole, params) cuts this rank's slices of it."
)


@final
@dataclass(frozen=True)
class Division:
    """How parameters of these shapes and dtypes are divided among ``ranks``, of which this one is ``rank``."""

    by_item: bool
    rank: int
    ranks: int
    params: tuple[tuple[tuple[int, ...], DType], ...]

    @cached_property
    def ranges(self) -> tuple[Ranges, ...]:
        """The items of each parameter on each rank."""
        sizes = [math.prod(shape) for shape, _ in self.params]
        return even_slices(sizes, [1] * len(sizes), self.ranks) if self.by_item else whole_slices(sizes, self.ranks)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of this rank's slice of each parameter, with as many dimensions; ``None`` if others have its items.
        One without items is on all ranks.
        """
        return tuple(self._slice_shape(*pair) for pair in zip(self.params, self.ranges, strict=True))

    def _slice_shape(self, param: tuple[tuple[int, ...], Any], ranges: Ranges) -> tuple[int, ...] | None:
        (shape, _), (start, stop) = param, ranges[self.rank]
        if start == stop and 0 not in shape:
            return None
        return (*(1 for _ in shape[1:]), stop - start) if self.by_item and shape else shape

    def layout(self, dtypes: Sequence[DType]) -> tuple[GradientKind, ...]:
        """The layout of arrays of the parameters' shapes and these dtypes."""
        triples = zip(self.params, dtypes, self.ranges, strict=True)
        return tuple(GradientKind(shape, np.dtype(dtype), ranges) for (shape, _), dtype, ranges in triples)

    def ranges_of_state(self, position: int, shape: tuple[int, ...]) -> Ranges:
        """The items on each rank of an array of the state that belongs to the parameter at ``position``."""
        items, ranges, size = math.prod(shape), self.ranges[position], math.prod(self.params[position][0])
        if self.by_item and items == size:
            return ranges
        owner = next((rank for rank, (start, stop) in enumerate(ranges) if start < stop), 0)
        return tuple((0, items if rank == owner else 0) for rank in range(self.ranks))

    def arrays_of(self, tree: Any) -> dict[int, Any]:
        """The parameters in a tree, or what has their shapes, as ``trained_of`` returns them."""
        arrays = trained_of(tree)
        if [each.shape for each in arrays.values()] != [shape for shape, _ in self.params]:
            raise ConfigError(
                f"the state is that of parameters of shapes {[shape for shape, _ in self.params]}, and given were "
                f"arrays of {[each.shape for each in arrays.values()]}: pass the parameters that init() was given."
            )
        return arrays

    def slices_of(self, tree: Any) -> Any:
        """Returns this rank's slices of a whole tree."""
        arrays = self.arrays_of(tree)
        slices = [
            None if shape is None else array.reshape(-1)[slice(*ranges[self.rank])].reshape(shape)
            for array, shape, ranges in zip(arrays.values(), self.shapes, self.ranges, strict=True)
        ]
        return with_slices(tree, list(arrays), slices)


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlicedState:
    """A rank's state of a transformation that ``distributed(tx, shard_state=True)`` has returned, a pytree.

    Attributes:
        inner: the state of ``tx`` for this rank's slices of the parameters.
        division: how the parameters are divided.
    """

    inner: Any
    division: Division = field(metadata={"static": True})


def refuse_slices(tree: Any, what: str) -> None:
    """An error if a state in ``tree`` is that of one rank's slices."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda each: isinstance(each, SlicedState))
    if any(isinstance(each, SlicedState) for each in leaves):
        raise ConfigError(
            f"{what} was given a state of distributed(tx, shard_state=True), of which each rank has its own slices: "
            f"pass the parameters only. {FILES}"
        )


def with_slices(tree: Any, indices: Sequence[int], slices: Sequence[Any]) -> Any:
    """Returns ``tree`` with these instead of the leaves at ``indices``; ``None`` for a slice without items."""
    import optax

    leaves, structure = jax.tree.flatten(tree)
    for index, each in zip(indices, slices, strict=True):
        leaves[index] = optax.MaskedNode() if each is None else each
    return structure.unflatten(leaves)


def of_models(layout: GradientKind, models: tuple[int, ...]) -> GradientKind:
    """The layout of an array of several models, the last dimension."""
    for number in models:
        ranges = tuple((start * number, stop * number) for start, stop in layout.ranges)
        layout = GradientKind((*layout.shape, number), layout.dtype, ranges)
    return layout


def trained_of(tree: Any) -> dict[int, Any]:
    """The leaves that have gradients, with their indices: arrays of floating-point numbers."""
    leaves, kinds = enumerate(jax.tree.leaves(tree)), (jax.Array, np.ndarray, np.generic, float)
    arrays = {index: jnp.asarray(leaf) for index, leaf in leaves if isinstance(leaf, kinds)}
    return {index: array for index, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.inexact)}
