"""NumPy arrays, Python numbers and lists of them."""

from typing import Any, final

import numpy as np

from choros.arrays.adapter import ArrayAdapter, ArraySpec, HostArray


@final
class NumpyArrays(ArrayAdapter):
    """Arrays in host memory; the results for Python numbers are Python numbers."""

    def to_host(self, array: Any) -> HostArray:
        """``numpy.asarray``."""
        return np.asarray(array)

    def from_host(self, host: HostArray, like: Any) -> Any:
        """Returns ``host`` itself, or a Python number if ``like`` is one."""
        return host.item() if isinstance(like, (bool, int, float)) and host.ndim == 0 else host

    def spec(self, array: Any) -> ArraySpec:
        """Shape and dtype."""
        host = np.asarray(array)
        return ArraySpec(host.shape, host.dtype)

    def cast(self, array: Any, dtype: np.dtype[np.generic]) -> Any:
        """``ndarray.astype``."""
        return np.asarray(array).astype(dtype, copy=False)

    def sum(self, array: Any) -> Any:
        """``numpy.sum``."""
        return np.sum(array)

    def zeros_like(self, array: Any) -> Any:
        """``numpy.zeros_like``."""
        return np.zeros_like(array)

    def stop_gradient(self, array: Any) -> Any:
        """Returns ``array``."""
        return array
