"""Arrays concatenated to one vector, and the interface of lossy vector sums."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.parallel.compression.error_feedback import ErrorFeedback
from choros.parallel.reduce.exchange import Array, Exchange, Layout

__all__ = ["Vector", "VectorExchange", "VectorSum"]

Vector = NDArray[np.float32]


class VectorSum(ABC):
    """Sums vectors of one length over the ranks, with fewer bytes and a rounding error.

    Attributes:
        description: how it sums. Ranks compare it before the first byte is sent.
    """

    description: str

    @abstractmethod
    def sum(self, vector: Vector, residual: Vector | None) -> Vector:
        """Returns the sum over the ranks, the same on every rank; not finite if any rank's vector is not.

        Args:
            vector: this rank's; not written to.
            residual: receives the part of ``vector`` that is not in the sum; ``None`` if it is not needed.
        """


@dataclass(frozen=True)
class _Group:
    """Concatenated arrays: array ``indices[i]`` at ``bounds[i]``."""

    indices: Sequence[int]
    bounds: Sequence[tuple[int, int]]
    method: VectorSum
    vector: Vector
    feedback: ErrorFeedback | None


@final
class VectorExchange(Exchange):
    """Concatenates the arrays of each group to one float32 vector, and sums that.

    Args:
        layout: floating-point arrays.
        groups: indices of all arrays, in groups.
        method: creates the sum of vectors of a given length.
        feedback: whether to use error feedback.
    """

    def __init__(
        self, layout: Layout, groups: Sequence[Sequence[int]], method: Callable[[int], VectorSum], *, feedback: bool
    ) -> None:
        self._layout = layout
        self._groups = []
        for group in groups:
            ends = list(accumulate((math.prod(layout[index][0]) for index in group), initial=0))
            vector = np.zeros(ends[-1], np.float32)
            error_feedback = ErrorFeedback(vector.shape) if feedback else None
            self._groups.append(_Group(group, list(pairwise(ends)), method(ends[-1]), vector, error_feedback))
        self.description = ", ".join(group.method.description for group in self._groups)

    def sum(self, arrays: Sequence[Array] | None, before: float, after: float) -> list[Array]:
        """See ``Exchange``."""
        results: dict[int, Array] = {}
        for group in self._groups:
            total = _sum(group, arrays, before)
            total *= np.float32(after)
            for index, (start, stop) in zip(group.indices, group.bounds, strict=True):
                shape, dtype = self._layout[index]
                results[index] = total[start:stop].reshape(shape).astype(dtype)
        return [results[index] for index in range(len(self._layout))]


def _sum(group: _Group, arrays: Sequence[Array] | None, before: float) -> Vector:
    vector = group.vector
    if arrays is None:
        vector.fill(0)
    else:
        for index, (start, stop) in zip(group.indices, group.bounds, strict=True):
            np.multiply(arrays[index].reshape(-1), before, out=vector[start:stop], dtype=np.float32, casting="unsafe")
    if group.feedback is None:
        return group.method.sum(vector, None)
    vector += group.feedback.residual
    total = group.method.sum(vector, group.feedback.next_residual)
    group.feedback.end_step(total)
    return total
