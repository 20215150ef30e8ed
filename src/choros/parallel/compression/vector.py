"""Many arrays in one vector, and what adds up the ranks' vectors."""

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
    """Sums vectors of one length over the ranks, saving bytes at the price of an error.

    Attributes:
        description: how. Part of what ranks compare before the first byte moves.
    """

    description: str

    @abstractmethod
    def sum(self, vector: Vector, lost: Vector | None) -> Vector:
        """The ranks' sum, the same on every rank; not finite if any rank's vector is not.

        Args:
            vector: this rank's; not written to.
            lost: where to write what of ``vector`` is not in the sum; ``None`` if nobody wants to know.
        """


@dataclass(frozen=True)
class _Group:
    """Arrays laid end to end: array ``indices[i]`` at ``bounds[i]``."""

    indices: Sequence[int]
    bounds: Sequence[tuple[int, int]]
    method: VectorSum
    vector: Vector
    feedback: ErrorFeedback | None


@final
class VectorExchange(Exchange):
    """Lays the arrays of each group end to end in one float32 vector, and sums that.

    Args:
        layout: floating-point arrays.
        groups: all of them, in groups.
        method: makes what sums vectors of a given length.
        feedback: whether the error is kept and added to the next step's vector.
    """

    def __init__(
        self, layout: Layout, groups: Sequence[Sequence[int]], method: Callable[[int], VectorSum], *, feedback: bool
    ) -> None:
        self._layout = layout
        self._groups = []
        for group in groups:
            ends = list(accumulate((math.prod(layout[index][0]) for index in group), initial=0))
            vector = np.zeros(ends[-1], np.float32)
            kept = ErrorFeedback(vector.shape) if feedback else None
            self._groups.append(_Group(group, list(pairwise(ends)), method(ends[-1]), vector, kept))
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
    vector += group.feedback.kept
    total = group.method.sum(vector, group.feedback.lost)
    group.feedback.settle(total)
    return total
