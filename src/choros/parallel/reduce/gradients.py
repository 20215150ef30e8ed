"""The gradients that the reducer takes: host arrays, tensors on a device and sparse rows, and their layout."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from choros.arrays import adapter_of
from choros.parallel.reduce.sparse import RowsLayout, SparseRows

#: A host array, a tensor on a device or ``SparseRows``.
Gradient: TypeAlias = Any
#: For each gradient its shape and dtype, and for a sparse one the dtype of its indices.
GradientLayout = tuple[tuple[tuple[int, ...], np.dtype[np.generic]] | RowsLayout, ...]


def layout_of(gradients: Sequence[Any]) -> GradientLayout:
    """Returns the layout of ``gradients``.

    >>> describe(layout_of([np.ones(2), SparseRows(np.array([3]), np.ones((1, 4)), shape=(9, 4))]))
    'float64[2], rows of float64[9, 4] by int64'
    """
    return tuple(
        each.layout if isinstance(each, SparseRows) else (tuple(each.shape), _dtype(each)) for each in gradients
    )


def describe(layout: GradientLayout) -> str:
    """Returns ``layout`` as text, for errors."""
    return ", ".join(str(each) if isinstance(each, RowsLayout) else f"{each[1]}{list(each[0])}" for each in layout)


def zeros_like(gradient: Any) -> Any:
    """Returns zeros of the same layout, on the device of ``gradient``."""
    return gradient.zeros() if isinstance(gradient, SparseRows) else adapter_of(gradient).zeros_like(gradient)


def zeros_of(layout: GradientLayout) -> list[Gradient]:
    """Returns zeros of ``layout``, in host memory."""
    return [each.rows(0) if isinstance(each, RowsLayout) else np.zeros(*each) for each in layout]


def _dtype(array: Any) -> np.dtype[np.generic]:
    return array.dtype if isinstance(array, np.ndarray) else np.dtype(str(array.dtype).removeprefix("torch."))
