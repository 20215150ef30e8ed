"""What a step does with gradients once ranks have agreed: the seam between the reducer and compression."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.comm.fusion import Layout

__all__ = ["Array", "Exchange", "Layout", "layout_of", "zeros_like"]

Array = NDArray[Any]


def layout_of(arrays: Sequence[Any]) -> Layout:
    """The shapes and dtypes of ``arrays``, of NumPy or of torch."""
    return tuple((tuple(array.shape), _dtype(array)) for array in arrays)


def zeros_like(array: Any) -> Any:
    """Zeros of the same shape and dtype, where ``array`` lies."""
    return np.zeros_like(array) if isinstance(array, np.ndarray) else array.new_zeros(array.shape)


def _dtype(array: Any) -> np.dtype[np.generic]:
    return array.dtype if isinstance(array, np.ndarray) else np.dtype(str(array.dtype).removeprefix("torch."))


class Exchange(ABC):
    """Sums arrays of one layout over the ranks of one communicator; made once, used every step.

    All ranks call ``sum`` alike, within the turn in which they have agreed to. What it keeps from step to
    step (buffers, the error of a compression) is its own.

    Attributes:
        description: how it sums. Part of what ranks compare before the first byte moves.
    """

    description: str

    @abstractmethod
    def sum(self, arrays: Sequence[Array] | None, before: float, after: float) -> list[Array]:
        """The sum over the ranks of ``arrays * before``, times ``after``.

        Args:
            arrays: this rank's, which are not written to; ``None`` stands for zeros, of a rank that has
                nothing to bring.
            before: what this rank's arrays are multiplied by, its share of the examples.
            after: what the sum is multiplied by, the same on every rank.

        Returns:
            New arrays of the layout's shapes and dtypes, the same on every rank.
        """
