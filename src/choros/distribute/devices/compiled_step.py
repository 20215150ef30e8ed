"""A function compiled for all replicas of a process, once for each pattern of its arguments."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from choros.distribute.devices.arrays import WeakMap
from choros.distribute.devices.collectives import AXIS, ReplicaCollectives, TracedCollectives

if TYPE_CHECKING:
    from choros.distribute.devices.keras_flow import Flow

#: Calls the user's function on one replica, given its collectives, its per-replica and the replicated values.
ReplicaFunction = Callable[[ReplicaCollectives, Sequence[Any], Sequence[Any]], Any]

_SHARDED, _REPLICATED = PartitionSpec(AXIS), PartitionSpec()


def run_replica(
    collectives: ReplicaCollectives, flow: Flow | None, variables: Sequence[Any], function: Callable[[], Any]
) -> tuple[Any, list[Any]]:
    """Calls ``function`` with the flow's Keras variables set to these values; also returns what it assigns to them."""
    return (function(), []) if flow is None else flow.run(collectives, variables, function)


@final
class CompiledStep:
    """One compiled step for all replicas; the flow's Keras variables are its first inputs and its last outputs."""

    def __init__(self, call: ReplicaFunction, mesh: Mesh, is_number: Sequence[bool], flow: Flow | None) -> None:
        self.flow = flow
        self._call = call
        self._is_number = tuple(is_number)
        #: For each result of the function, whether it is a scalar; known once it has been traced.
        self._result_is_number: tuple[bool, ...] = ()
        specs = {
            "in_specs": (_REPLICATED, _SHARDED, _REPLICATED),
            "out_specs": (_SHARDED, _REPLICATED),
            "check_vma": False,
        }
        self._compiled = jax.jit(jax.shard_map(self._on_device, mesh=mesh, **specs))

    def __call__(
        self, variables: Sequence[Any], per_replica: Sequence[Any], replicated: Sequence[Any]
    ) -> tuple[list[Any], tuple[bool, ...], Any, list[Any]]:
        """Returns the results' sharded leaves, which of them are scalars, their tree, and the flow's outputs."""
        results, assigned = self._compiled(list(variables), list(per_replica), list(replicated))
        leaves, tree = jax.tree.flatten(results)
        return leaves, self._result_is_number, tree, assigned

    def _on_device(self, variables: Any, per_replica: Any, replicated: Any) -> tuple[Any, list[Any]]:
        collectives = TracedCollectives()
        own = [
            array.reshape(()) if number else array for array, number in zip(per_replica, self._is_number, strict=True)
        ]
        results, assigned = run_replica(
            collectives, self.flow, variables, lambda: self._call(collectives, own, replicated)
        )
        results = jax.tree.map(jnp.asarray, results)
        self._result_is_number = tuple(leaf.ndim == 0 for leaf in jax.tree.leaves(results))
        return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf.reshape(1), results), assigned


def compiled_for(
    function: Callable[..., Any],
    key: Any,
    known: WeakMap[dict[Any, CompiledStep]],
    make: Callable[[Callable[..., Any]], CompiledStep],
) -> CompiledStep:
    """Returns the compiled step for arguments of this ``key``, ``known`` while the function, or a method's object,
    exists; the function that ``make`` gets does not keep the user's alive.
    """
    owner: Any = function
    method = None
    if isinstance(function, types.MethodType):
        owner, method = function.__self__, function.__func__
    reference = weakref.ref(owner)

    def weakly(*args: Any, **kwargs: Any) -> Any:
        own = reference()
        return own(*args, **kwargs) if method is None else method(own, *args, **kwargs)  # type: ignore[misc]

    steps = known.get(owner)
    if steps is None:
        known[owner] = steps = {}
    if (method, key) not in steps:
        steps[method, key] = make(weakly)
    return steps[method, key]
