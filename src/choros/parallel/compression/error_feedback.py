"""What a compression leaves out is not lost, but late."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ErrorFeedback"]

Floats = NDArray[np.float32]


@final
class ErrorFeedback:
    """The error of a lossy compression, which is added to what is compressed next.

    Without it, biased compressions such as top-k need not converge; with it they do at the rate of plain SGD
    (Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847)::

        kept ──► + gradient ──► compress ──► what arrives
         ▲                          │
         └──────── lost ◄───────────┘

    The error is of what is *sent*, the gradient times this rank's share of the examples, and a rank that has
    joined brings it along with its zeros. A step whose sum is not finite is one that the loss scale skips on
    all ranks: then the error stays what it was before.

    Attributes:
        kept: what earlier steps have left out.
        lost: where the compression writes what this step leaves out.

    Example:
        >>> feedback = ErrorFeedback((2,))
        >>> feedback.lost[:] = 0.25
        >>> feedback.settle(np.ones(2))
        True
        >>> feedback.kept
        array([0.25, 0.25], dtype=float32)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.kept: Floats = np.zeros(shape, np.float32)
        self.lost: Floats = np.zeros(shape, np.float32)

    def settle(self, total: NDArray[Any]) -> bool:
        """Ends a step; ``total`` is what all ranks got. Returns whether it is finite, so that the step counts."""
        finite = bool(np.isfinite(total).all())
        if finite:
            self.kept, self.lost = self.lost, self.kept
        return finite
