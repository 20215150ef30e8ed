"""JAX arrays over the devices of a mesh: batches that are dealt out, variables that are alike everywhere.

A step of two processes with two devices each; process 0 brings three examples, process 1 two::

             process 0              process 1
    host     a b c                  d e
             │ as many rows for each device as hold everybody's examples: 2
             ▼
    device   [a b]    [c ·]         [d e]    [· ·]          padding, so that all parts are of one shape
    ─────────┼────────┼─────────────┼────────┼───────── into the compiled step
    device   [a b]    [c d]         [e]      []             the examples alone, in this order, dealt out anew

The second deal is XLA's: inside a compiled step parts need not be of one shape. What the model computes is thus
computed from the global batch exactly, whatever it is: a mean over examples, a loss of the batch as a whole, the
moments of a batch normalisation, a metric, a random mask. No weight of zero has to be smuggled past them. Only a
batch that the devices cannot share equally needs it; the others go in as they are.

Between steps, Keras' variables stay ordinary arrays of this process's first device: callbacks, checkpoints and
``evaluate`` on one rank see nothing of the mesh. ``spread`` and ``gathered`` go from one to the other, without a
copy where the process has one device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from choros.errors import ConfigError
from choros.training.batch_plan import BatchPlan

__all__ = [
    "GlobalBatch",
    "assemble",
    "count_examples",
    "devices_by_process",
    "examples_of",
    "gathered",
    "is_on",
    "local_mesh",
    "replicated",
    "spread",
]


class GlobalBatch(NamedTuple):
    """A batch on the devices of a mesh.

    Attributes:
        rows: what ``model.fit`` takes as a batch, of global arrays whose first dimension is dealt out.
        index: the rows that are examples; ``None`` if all are.
    """

    rows: Any
    index: Any


def devices_by_process(mesh: Mesh) -> tuple[int, ...]:
    """How many devices of ``mesh`` each process has, in the order of the mesh."""
    owners = [device.process_index for device in mesh.devices.flat]
    return tuple(owners.count(owner) for owner in dict.fromkeys(owners))


@functools.cache
def local_mesh(mesh: Mesh) -> Mesh:
    """The devices of ``mesh`` that this process has."""
    return Mesh(np.array(mesh.local_devices), mesh.axis_names)


def assemble(data: Any, plan: BatchPlan, mesh: Mesh) -> GlobalBatch:
    """Puts this process's examples on its devices, as its part of a global batch.

    Args:
        data: a batch as Keras' data adapters yield it: a structure of NumPy or JAX arrays and ``None``.
        plan: the batch; the same on every process.
        mesh: one dimension, in the order of the processes.
    """
    here = NamedSharding(local_mesh(mesh), PartitionSpec(*mesh.axis_names))
    everywhere = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    def put(leaf: Any) -> Any:
        own = jax.device_put(_padded(leaf, plan.rows * len(mesh.local_devices)), here)
        return _joined(own, (plan.rows * mesh.size, *own.shape[1:]), everywhere)

    index = (
        None if plan.is_even else _joined(jax.device_put(plan.index(), _alike(local_mesh(mesh))), None, _alike(mesh))
    )
    return GlobalBatch(jax.tree.map(put, data), index)


def examples_of(batch: GlobalBatch, mesh: Mesh) -> Any:
    """The examples of a global batch, inside the compiled step."""
    if batch.index is None:
        return batch.rows
    dealt_out = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    def chosen(rows: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.take(rows, batch.index, axis=0, mode="clip"), dealt_out)

    return jax.tree.map(chosen, batch.rows)


def replicated(values: Any, mesh: Mesh) -> Any:
    """Inside a compiled step: ``values``, every device of the mesh with all of them."""
    return jax.lax.with_sharding_constraint(values, _alike(mesh))


def spread(values: Any, mesh: Mesh) -> Any:
    """Arrays of one device, equal on all processes, as arrays that every device of the mesh has."""
    here, everywhere = _alike(local_mesh(mesh)), _alike(mesh)
    return jax.tree.map(lambda array: _joined(jax.device_put(array, here), None, everywhere), values)


def is_on(array: Any, mesh: Mesh) -> bool:
    """Whether ``array`` is on all devices of ``mesh``."""
    return bool(len(array.sharding.device_set) == mesh.size)


def gathered(values: Any) -> Any:
    """What ``spread`` spread, back on this process's first device; other values are left as they are."""

    def first(array: Any) -> Any:
        if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
            return array.addressable_shards[0].data
        return array

    return jax.tree.map(first, values)


def count_examples(data: Any) -> int:
    """How many examples a batch of this process has.

    Raises:
        ConfigError: the batch has none, its arrays differ in it, or they are sparse.
    """
    leaves = jax.tree.leaves(data, is_leaf=_is_sparse)
    if any(map(_is_sparse, leaves)):
        raise ConfigError("a batch has sparse arrays, which cannot be dealt out to devices: make them dense.")
    lengths = {np.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        words = ", ".join(sorted(str(*length) if length else "no number of" for length in lengths))
        raise ConfigError(f"the arrays of a batch have {words} examples: all must have as many, and at least one.")
    ((count,),) = lengths
    return int(count)


def _is_sparse(leaf: Any) -> bool:
    return hasattr(leaf, "todense")


@functools.cache
def _alike(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _joined(own: Any, shape: tuple[int, ...] | None, everywhere: NamedSharding) -> Any:
    """The global array of which ``own`` has this process's part."""
    parts = [shard.data for shard in own.addressable_shards]
    return jax.make_array_from_single_device_arrays(own.shape if shape is None else shape, everywhere, parts)


def _padded(leaf: Any, rows: int) -> Any:
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    missing = rows - array.shape[0]
    if missing == 0:
        return array
    pad = jnp.pad if isinstance(array, jax.Array) else np.pad
    return pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
