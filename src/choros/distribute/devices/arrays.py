"""Values of replicas as one array over their devices, and back.

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
    """The arrays of a mesh.

    Args:
        mesh: one dimension, a device a replica.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.devices = list(mesh.devices.flat)
        self._dealt_out = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        self._alike = NamedSharding(mesh, PartitionSpec())
        #: The arrays that values were part of, so that they need not be put together anew.
        self._whole: WeakMap[Any] = WeakMap()
        #: Of Keras variables: the value here, and the same everywhere.
        self._variables: WeakMap[tuple[Any, Any]] = WeakMap()

    def whole(self, value: PerReplica) -> Any:
        """The array of which ``value`` has the parts, which are of one shape; what is in its place is not copied."""
        known = self._whole.get(value)
        if known is not None:
            return known
        parts = [jax.device_put(part, device) for part, device in zip(value.values, self.devices, strict=True)]
        parts = [part if part.ndim else part.reshape(1) for part in parts]
        length, *rest = parts[0].shape
        array = jax.make_array_from_single_device_arrays((length * len(parts), *rest), self._dealt_out, parts)
        self._whole[value] = array
        return array

    def parts(self, array: Any, *, numbers: bool) -> PerReplica:
        """The replicas' values; ``numbers`` if each has no dimension."""
        # In the order of the mesh. addressable_shards would make an object of each, which costs more than all else.
        values = [array.addressable_data(index) for index in range(len(self.devices))]
        value = PerReplica([value.reshape(()) for value in values] if numbers else values)
        self._whole[value] = array
        return value

    def alike(self, values: Sequence[Any]) -> list[Any]:
        """Arrays that every replica has."""
        return list(jax.device_put(list(values), self._alike))

    def of_variables(self, variables: Sequence[Any]) -> list[Any]:
        """The values of Keras variables for every replica; copied to the devices if they have changed meanwhile."""
        return [self._of_variable(variable) for variable in variables]

    def assign(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Gives Keras variables the value that every replica has, as an ordinary array of the first device."""
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array.addressable_data(0))
            self._variables[variable] = (variable.value, array)

    def _of_variable(self, variable: Any) -> Any:
        value, array = self._variables.get(variable) or (None, None)
        if value is not variable.value:
            array = jax.device_put(variable.value, self._alike)
            self._variables[variable] = (variable.value, array)
        return array
