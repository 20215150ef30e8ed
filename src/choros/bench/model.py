"""The α-β model of an allreduce, fitted to measurements.

``T(n) = 2·lg p·α + 2·(p−1)/p·n·β`` for ``p`` ranks and ``n`` bytes: the latency of recursive halving and
doubling, and the least number of bytes that any algorithm must move (Rabenseifner 2004; Thakur, Rabenseifner and
Gropp 2005; Patarasuk and Yuan 2009). α is the time of a message, β that of a byte, arithmetic included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["AlphaBeta", "fit"]


@dataclass(frozen=True)
class AlphaBeta:
    """The model for ``ranks`` ranks.

    Attributes:
        ranks: the number of ranks, 2 or more.
        alpha_s: seconds per message.
        beta_s: seconds per byte.

    Example:
        >>> AlphaBeta(ranks=4, alpha_s=1e-6, beta_s=1e-9).seconds(1000)
        5.5e-06
    """

    ranks: int
    alpha_s: float
    beta_s: float

    def seconds(self, size: float) -> float:
        """Returns the time of an allreduce of ``size`` bytes."""
        per_message, per_byte = _coefficients(self.ranks, size)
        return per_message * self.alpha_s + per_byte * self.beta_s


def _coefficients(ranks: int, size: float) -> tuple[float, float]:
    return 2 * math.log2(ranks), 2 * (ranks - 1) / ranks * size


def fit(ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta | None:
    """Returns the model that fits best; ``None`` for one rank, which sends nothing, or one size, which fits any line.

    The fit is least squares of the *relative* error: sizes span orders of magnitude and have equal weight. Neither
    parameter is negative.

    Args:
        ranks: the number of ranks.
        sizes: the numbers of bytes.
        seconds: the time for each size.

    Example:
        >>> truth = AlphaBeta(2, 1e-5, 1e-9)
        >>> fitted = fit(2, [2**10, 2**20, 2**26], [truth.seconds(n) for n in (2**10, 2**20, 2**26)])
        >>> round(fitted.alpha_s * 1e6, 3), round(fitted.beta_s * 1e9, 3)
        (10.0, 1.0)
    """
    if ranks < 2 or len(sizes) < 2:
        return None
    times = np.asarray(seconds, np.float64)
    matrix = np.array([_coefficients(ranks, size) for size in sizes]) / times[:, None]
    solution = np.linalg.lstsq(matrix, np.ones(len(times)), rcond=None)[0]  # as NumPy 2 does without it
    if solution.min() < 0:  # fit one alone: β, unless only α is positive
        kept = 0 if solution[0] > 0 else 1
        column = matrix[:, kept]
        solution = np.zeros(2)
        solution[kept] = column.sum() / (column @ column)
    return AlphaBeta(ranks, float(solution[0]), float(solution[1]))
