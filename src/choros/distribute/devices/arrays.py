"""The arguments of a function that replicas run, flattened for compilation, and their per-replica values as one array
that is sharded over the devices.

::

    PerReplica(a, b), a and b of shape (3, 5)  ◄──►  one array of shape (6, 5), a on device 0, b on device 1
    PerReplica(1.0, 2.0)                       ◄──►  one array of shape (2,)
"""

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


@final
class DeviceArrays:
    """The global arrays of a mesh with one dimension and one device per replica."""

    def __init__(self, mesh: Mesh) -> None:
        self.devices = list(mesh.devices.flat)
        self._sharded = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        #: Per-replica value → the global array that it is part of, so that it need not be assembled again.
        self._global_arrays: WeakMap[Any] = WeakMap()
        #: Keras variable → its local value, and the replicated array of the same value.
        self._variables: WeakMap[tuple[Any, Any]] = WeakMap()

    def global_array(self, value: PerReplica) -> Any:
        """Returns the array whose shards are the values, all of one shape; values on their device are not copied."""
        known = self._global_arrays.get(value)
        if known is not None:
            return known
        parts = [jax.device_put(part, device) for part, device in zip(value.values, self.devices, strict=True)]
        parts = [part if part.ndim else part.reshape(1) for part in parts]
        length, *rest = parts[0].shape
        array = jax.make_array_from_single_device_arrays((length * len(parts), *rest), self._sharded, parts)
        self._global_arrays[value] = array
        return array

    def per_replica(self, array: Any, *, numbers: bool) -> PerReplica:
        """Returns the replicas' values; ``numbers``: whether they are scalars."""
        # In the order of the mesh. addressable_shards would create an object for each shard, the largest cost here.
        values = [array.addressable_data(index) for index in range(len(self.devices))]
        value = PerReplica([value.reshape(()) for value in values] if numbers else values)
        self._global_arrays[value] = array
        return value

    def replicate(self, values: Sequence[Any]) -> list[Any]:
        """Copies values to every replica's device."""
        return list(jax.device_put(list(values), self._replicated))

    def variable_values(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the replicated values of Keras variables; copies them to the devices only if they have changed."""
        arrays = []
        for variable in variables:
            value, array = self._variables.get(variable) or (None, None)
            if value is not variable.value:
                array = jax.device_put(variable.value, self._replicated)
                self._variables[variable] = (variable.value, array)
            arrays.append(array)
        return arrays

    def assign(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Assigns the replicated values to Keras variables, as ordinary arrays of the first device."""
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array.addressable_data(0))
            self._variables[variable] = (variable.value, array)


V = TypeVar("V")


@final
class WeakMap(Generic[V]):
    """A weak-key dictionary by identity, for keys that redefine equality, as Keras variables do.

    >>> class Owner: ...
    >>> owner, known = Owner(), WeakMap()
    >>> known[owner] = 1
    >>> known.get(owner), known.get(Owner())
    (1, None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, key: Any) -> V | None:
        """Returns the value of ``key``; ``None`` if there is none."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def __setitem__(self, key: Any, value: V) -> None:
        number = id(key)
        self._entries[number] = (weakref.ref(key, lambda _: self._entries.pop(number, None)), value)
