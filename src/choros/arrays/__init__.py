"""What a framework's array is: one adapter of primitives each, found by the array's type.

A framework is never imported for the user: an array of it in hand proves that it is loaded.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from choros.arrays.adapter import ArrayAdapter, ArrayFunction, ArraySpec, HostFunction
from choros.arrays.numpy_arrays import NumpyArrays
from choros.errors import ConfigError

__all__ = ["ArrayAdapter", "ArrayFunction", "ArraySpec", "HostFunction", "adapter_of", "framework_adapter"]

#: The package an array's class comes from → the framework.
_PACKAGES = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax"}
_ADAPTERS = {"torch": "TorchArrays", "tensorflow": "TensorflowArrays", "jax": "JaxArrays"}
_NUMPY = NumpyArrays()


@cache
def framework_adapter(framework: str) -> ArrayAdapter:
    """The adapter of ``tensorflow``, ``torch``, ``jax`` or ``numpy``; imports the framework.

    Raises:
        ConfigError: choros knows no such framework.
    """
    if framework == "numpy":
        return _NUMPY
    if framework not in _ADAPTERS:
        raise ConfigError(f"choros works with the frameworks {', '.join(_ADAPTERS)}; {framework!r} is none of them.")
    module = import_module(f"choros.arrays.{framework}_arrays")
    adapter: ArrayAdapter = getattr(module, _ADAPTERS[framework])()
    return adapter


def _framework_of(kind: type) -> str:
    for base in kind.__mro__:
        framework = _PACKAGES.get(base.__module__.partition(".")[0])
        if framework:
            return framework
    return "numpy"


def adapter_of(array: Any) -> ArrayAdapter:
    """The adapter of ``array``'s framework; that of NumPy for numbers, lists and all else.

    Example:
        >>> type(adapter_of([1.0, 2.0])).__name__
        'NumpyArrays'
    """
    return framework_adapter(_framework_of(type(array)))
