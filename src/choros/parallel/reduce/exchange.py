"""The interface between the reducer and compression: an exchange sums arrays over the ranks."""

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
    """Returns the shapes and dtypes of ``arrays``, of NumPy or of torch."""
    return tuple((tuple(array.shape), _dtype(array)) for array in arrays)


def zeros_like(array: Any) -> Any:
    """Returns zeros of the same shape and dtype, on the device of ``array``."""
    return np.zeros_like(array) if isinstance(array, np.ndarray) else array.new_zeros(array.shape)


def _dtype(array: Any) -> np.dtype[np.generic]:
    return array.dtype if isinstance(array, np.ndarray) else np.dtype(str(array.dtype).removeprefix("torch."))


class Exchange(ABC):
    """Sums arrays of one layout over the ranks of one communicator; created once, used in every step.

    All ranks call ``sum`` within the exclusive section in which they have agreed on the step. It owns the state that it
    keeps from step to step (buffers, the residual of a compression).

    Attributes:
        description: how it sums. Ranks compare it before the first byte is sent.
    """

    description: str

    @abstractmethod
    def sum(self, arrays: Sequence[Array] | None, before: float, after: float) -> list[Array]:
        """Returns the sum over the ranks of ``arrays * before``, times ``after``.

        Args:
            arrays: this rank's, which are not written to; ``None`` for zeros, of a rank that has no gradients.
            before: the factor of this rank's arrays: its share of the examples.
            after: the factor of the sum, the same on every rank.

        Returns:
            New arrays of the layout's shapes and dtypes, the same on every rank.
        """
