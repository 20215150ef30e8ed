"""Conversion between per-replica values and one array sharded over their devices.

::

    PerReplica(a, b), a and b of shape (3, 5)  ◄──►  one array of shape (6, 5), a on device 0, b on device 1
    PerReplica(1.0, 2.0)                       ◄──►  one array of shape (2,)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from choros.distribute.devices.weak_map import WeakMap
from choros.distribute.values import PerReplica

__all__ = ["DeviceArrays"]


@final
class DeviceArrays:
    """The global arrays of a mesh.

    Args:
        mesh: has one dimension, with one device per replica.
    """

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
        return [self._variable_value(variable) for variable in variables]

    def assign(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Assigns the replicated values to Keras variables, as ordinary arrays of the first device."""
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array.addressable_data(0))
            self._variables[variable] = (variable.value, array)

    def _variable_value(self, variable: Any) -> Any:
        value, array = self._variables.get(variable) or (None, None)
        if value is not variable.value:
            array = jax.device_put(variable.value, self._replicated)
            self._variables[variable] = (variable.value, array)
        return array
