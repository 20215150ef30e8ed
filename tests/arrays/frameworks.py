"""Arrays of each framework, created without choros."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.comm.reduction import DTYPES

#: The framework whose cases this process runs.
FRAMEWORK = os.environ.get("KERAS_BACKEND", "numpy")


def make(host: NDArray) -> Any:
    """Returns a copy of ``host`` as an array of the framework."""
    name = host.dtype.name
    if FRAMEWORK == "torch":
        torch = import_module("torch")
        return torch.tensor(host.tolist(), dtype=getattr(torch, name)).reshape(host.shape)
    if FRAMEWORK == "tensorflow":
        return import_module("tensorflow").constant(host)
    if FRAMEWORK == "jax":
        return import_module("jax").numpy.array(host)
    return host.copy()


def dtypes() -> list[np.dtype]:
    """Returns the dtypes of the framework: JAX has no 64-bit dtypes by default."""
    return [dtype for dtype in DTYPES if not (FRAMEWORK == "jax" and dtype.itemsize == 8)]


def dtype_name(array: Any) -> str:
    """Returns the dtype's name in NumPy."""
    return getattr(array.dtype, "name", str(array.dtype)).removeprefix("torch.")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` compiled by the framework, or unchanged if it does not compile."""
    if FRAMEWORK == "tensorflow":
        return import_module("tensorflow").function(function)
    if FRAMEWORK == "jax":
        return import_module("jax").jit(function)
    return function
