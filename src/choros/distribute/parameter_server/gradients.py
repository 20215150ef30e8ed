"""Accumulation and clipping of gradients on the worker, before they are sent.

Both need the whole gradient, of which a server may hold only a shard. The formulas are those of Keras'
``BaseOptimizer``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Accumulator", "Clipping"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Clipping:
    """An optimizer's ``clipnorm``, ``global_clipnorm`` and ``clipvalue``; at most one of them is set.

    Example:
        >>> import numpy as np
        >>> Clipping(global_clipnorm=1.0).apply([np.array([3.0]), np.array([4.0])])
        [array([0.6]), array([0.8])]
    """

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None

    def apply(self, gradients: Sequence[Array]) -> list[Array]:
        """Returns the clipped gradients; ``global_clipnorm`` needs those of all variables."""
        if self.clipnorm:
            return [_to_norm(gradient, _norm(gradient), self.clipnorm) for gradient in gradients]
        if self.global_clipnorm:
            norm = math.sqrt(sum(_norm(gradient) ** 2 for gradient in gradients))
            return [_to_norm(gradient, norm, self.global_clipnorm) for gradient in gradients]
        if self.clipvalue:
            return [np.clip(gradient, -self.clipvalue, self.clipvalue) for gradient in gradients]
        return list(gradients)


@final
class Accumulator:
    """Adds up the gradients of ``steps`` batches.

    Args:
        steps: the number of batches per update.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._seen = 0
        self._sums: list[Array] = []

    def add(self, gradients: Sequence[Array]) -> list[Array] | None:
        """Returns the mean of the last ``steps`` gradients, or ``None`` while there are fewer.

        Args:
            gradients: of the same variables in every call.
        """
        if self._steps == 1:
            return list(gradients)
        # Not in place: the framework owns these arrays.
        sums = zip(self._sums, gradients, strict=True) if self._seen else ((0, gradient) for gradient in gradients)
        self._sums = [total + gradient for total, gradient in sums]
        self._seen += 1
        if self._seen < self._steps:
            return None
        self._seen = 0
        return [total / np.asarray(self._steps, total.dtype) for total in self._sums]


def _norm(gradient: Array) -> float:
    return float(np.linalg.norm(gradient.astype(np.float64).ravel()))


def _to_norm(gradient: Array, norm: float, limit: float) -> Array:
    return gradient if norm <= limit else gradient * np.asarray(limit / norm, gradient.dtype)
