"""Conversion between per-replica values and one array sharded over their devices.

::

    PerReplica(a, b), a and b of shape (3, 5)  ◄──►  one array of shape (6, 5), a on device 0, b on device 1
    PerReplica(1.0, 2.0)                       ◄──►  one array of shape (2,)
"""

import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from choros.distribute.types import PerReplica


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
