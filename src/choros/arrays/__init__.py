"""Adapters for the frameworks' arrays, chosen by an array's type: an array shows that its framework is imported."""

from importlib import import_module
from typing import Any

from choros.arrays.adapter import ArrayAdapter, ArrayFunction, ArraySpec, DeviceArrayAdapter, HostFunction, NumpyArrays
from choros.errors import ConfigError

#: The package of an array's class → the framework.
_PACKAGES = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax"}
_FRAMEWORKS = ("torch", "tensorflow", "jax")
#: The adapters that are in use.
_adapters: dict[str, ArrayAdapter] = {"numpy": NumpyArrays()}


def framework_adapter(framework: str) -> ArrayAdapter:
    """Returns the adapter of ``tensorflow``, ``torch``, ``jax`` or ``numpy``; imports the framework."""
    if framework not in _adapters:
        if framework not in _FRAMEWORKS:
            raise ConfigError(f"{framework!r} is not a supported framework: expected one of {', '.join(_FRAMEWORKS)}.")
        _adapters[framework] = import_module(f"choros.arrays.{framework}_arrays").ADAPTER
    return _adapters[framework]


def device_adapter(framework: str) -> DeviceArrayAdapter:
    """Returns the adapter of a framework whose arrays are reduced on their device: ``tensorflow`` or ``torch``."""
    adapter = framework_adapter(framework)
    if not isinstance(adapter, DeviceArrayAdapter):
        raise ConfigError(f"arrays of {framework} are reduced through host memory, not on their device.")
    return adapter


def adapter_of(array: Any) -> ArrayAdapter:
    """Returns the adapter of ``array``'s framework; that of NumPy for numbers, lists and all other types.

    >>> type(adapter_of([1.0, 2.0])).__name__
    'NumpyArrays'
    """
    packages = (base.__module__.partition(".")[0] for base in type(array).__mro__)
    return framework_adapter(next((_PACKAGES[each] for each in packages if each in _PACKAGES), "numpy"))
