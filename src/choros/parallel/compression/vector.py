"""Arrays concatenated to one vector, the interface of lossy vector sums, and the feedback of their errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from choros.comm.fusion import Layout
from choros.parallel.reduce.exchange import Array, Exchange

Vector = NDArray[np.float32]


class VectorSum(ABC):
    """Sums vectors of one length over the ranks, with a rounding error; ranks compare ``description`` first."""

    description: str

    @abstractmethod
    def sum(self, vector: Vector, residual: Vector | None) -> Vector:
        """Returns the same sum on every rank, not finite if any vector is not; ``residual`` receives what it lacks."""


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
    """Concatenates the arrays of each group to one float32 vector, and sums that; ``method`` creates the sum."""

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


@final
class ErrorFeedback:
    """The residual of a lossy compression, which is added to the next step's values before they are compressed.

    Without it, biased compressions such as top-k need not converge (Karimireddy et al. 2019, arXiv:1901.09847)::

        residual ──► + gradient ──► compress ──► received values
           ▲                             │
           └─────── next_residual ◄──────┘

    It is that of the *sent* values, so a rank that has joined still sends it; steps that are not finite keep it.

        >>> feedback = ErrorFeedback((2,))
        >>> feedback.next_residual[:] = 0.25
        >>> feedback.end_step(np.ones(2))
        True
        >>> feedback.residual
        array([0.25, 0.25], dtype=float32)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.residual: Vector = np.zeros(shape, np.float32)
        self.next_residual: Vector = np.zeros(shape, np.float32)

    def end_step(self, total: NDArray[Any]) -> bool:
        """Ends a step with the sum ``total`` of all ranks; returns whether it is finite, so that the step counts."""
        finite = bool(np.isfinite(total).all())
        if finite:
            self.residual, self.next_residual = self.next_residual, self.residual
        return finite
