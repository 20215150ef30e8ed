"""JAX arrays over the devices of a mesh: sharded batches and replicated variables.

A step of two processes with two devices each; process 0 has three examples, process 1 two::

             process 0              process 1
    host     a b c                  d e
             │ the same number of rows for each device, enough for all examples: 2
             ▼
    device   [a b]    [c ·]         [d e]    [· ·]          padded, so that all shards have one shape
    ─────────┼────────┼─────────────┼────────┼───────── into the compiled step
    device   [a b]    [c d]         [e]      []             the examples alone, in this order, sharded again

XLA does the second sharding: inside a compiled step shards may have different shapes. Everything the model computes
(a mean over examples, a loss of the whole batch, the moments of a batch normalisation, a metric, a random mask) is
therefore computed from exactly the global batch, and nothing needs to be masked with weights of zero. Only a batch
that does not divide equally over the devices needs this; the others are passed to the step as they are.

Between steps, Keras' variables stay ordinary arrays on this process's first device: callbacks, checkpoints and
``evaluate`` on one rank do not see the mesh. ``replicate`` and ``unreplicate`` convert between the two forms, without
a copy where the process has one device.
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
    "constrain_replicated",
    "count_examples",
    "devices_by_process",
    "examples_of",
    "is_on",
    "local_mesh",
    "replicate",
    "unreplicate",
]


class GlobalBatch(NamedTuple):
    """A batch on the devices of a mesh.

    Attributes:
        rows: a batch as ``model.fit`` takes it, of global arrays sharded along the first dimension.
        index: the indices of the rows that are examples; ``None`` if all are.
    """

    rows: Any
    index: Any


def devices_by_process(mesh: Mesh) -> tuple[int, ...]:
    """The number of devices of ``mesh`` in each process, in the order of the mesh."""
    owners = [device.process_index for device in mesh.devices.flat]
    return tuple(owners.count(owner) for owner in dict.fromkeys(owners))


@functools.cache
def local_mesh(mesh: Mesh) -> Mesh:
    """The mesh of this process's devices of ``mesh``."""
    return Mesh(np.array(mesh.local_devices), mesh.axis_names)


def assemble(data: Any, plan: BatchPlan, mesh: Mesh) -> GlobalBatch:
    """Puts this process's examples on its devices, as its shard of a global batch.

    Args:
        data: a batch as Keras' data adapters yield it: a structure of NumPy or JAX arrays and ``None``.
        plan: the plan of the batch, the same on every process.
        mesh: one-dimensional, in the order of the processes.
    """
    here = NamedSharding(local_mesh(mesh), PartitionSpec(*mesh.axis_names))
    everywhere = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    def put(leaf: Any) -> Any:
        own = jax.device_put(_padded(leaf, plan.rows * len(mesh.local_devices)), here)
        return _global_array(own, (plan.rows * mesh.size, *own.shape[1:]), everywhere)

    index = None
    if not plan.is_even:
        own = jax.device_put(plan.index(), _replicated_sharding(local_mesh(mesh)))
        index = _global_array(own, None, _replicated_sharding(mesh))
    return GlobalBatch(jax.tree.map(put, data), index)


def examples_of(batch: GlobalBatch, mesh: Mesh) -> Any:
    """Returns the examples of a global batch, inside the compiled step."""
    if batch.index is None:
        return batch.rows
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

    def select(rows: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.take(rows, batch.index, axis=0, mode="clip"), sharding)

    return jax.tree.map(select, batch.rows)


def constrain_replicated(values: Any, mesh: Mesh) -> Any:
    """Inside a compiled step: ``values``, replicated on every device of the mesh."""
    return jax.lax.with_sharding_constraint(values, _replicated_sharding(mesh))


def replicate(values: Any, mesh: Mesh) -> Any:
    """Returns arrays of one device, identical on all processes, as arrays replicated on every device of the mesh."""
    here, everywhere = _replicated_sharding(local_mesh(mesh)), _replicated_sharding(mesh)
    return jax.tree.map(lambda array: _global_array(jax.device_put(array, here), None, everywhere), values)


def is_on(array: Any, mesh: Mesh) -> bool:
    """Whether ``array`` is on all devices of ``mesh``."""
    return bool(len(array.sharding.device_set) == mesh.size)


def unreplicate(values: Any) -> Any:
    """Undoes ``replicate``: returns this process's first copy of each array; other values are left as they are."""

    def first(array: Any) -> Any:
        if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
            return array.addressable_shards[0].data
        return array

    return jax.tree.map(first, values)


def count_examples(data: Any) -> int:
    """The number of examples in a batch of this process.

    Raises:
        ConfigError: the batch is empty, its arrays have different numbers of rows, or they are sparse.
    """
    leaves = jax.tree.leaves(data, is_leaf=_is_sparse)
    if any(map(_is_sparse, leaves)):
        raise ConfigError("a batch has sparse arrays, which cannot be sharded over devices: convert them to dense.")
    lengths = {np.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        counts = ", ".join(sorted(str(*length) if length else "no number of" for length in lengths))
        raise ConfigError(f"the arrays of a batch have {counts} examples: all must have the same number, at least one.")
    ((count,),) = lengths
    return int(count)


def _is_sparse(leaf: Any) -> bool:
    return hasattr(leaf, "todense")


@functools.cache
def _replicated_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _global_array(own: Any, shape: tuple[int, ...] | None, everywhere: NamedSharding) -> Any:
    """The global array whose shards in this process are those of ``own``."""
    shards = [shard.data for shard in own.addressable_shards]
    return jax.make_array_from_single_device_arrays(own.shape if shape is None else shape, everywhere, shards)


def _padded(leaf: Any, rows: int) -> Any:
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    missing = rows - array.shape[0]
    if missing == 0:
        return array
    pad = jnp.pad if isinstance(array, jax.Array) else np.pad
    return pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
