"""Error feedback: the error of a lossy compression is added to the next step's gradients."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ErrorFeedback"]

Floats = NDArray[np.float32]


@final
class ErrorFeedback:
    """The residual of a lossy compression, which is added to the next step's values before they are compressed.

    Without it, biased compressions such as top-k need not converge; with it they do at the rate of plain SGD
    (Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847)::

        residual ──► + gradient ──► compress ──► received values
           ▲                             │
           └─────── next_residual ◄──────┘

    The residual is that of the *sent* values, the gradient times this rank's share of the examples. A rank that has
    joined still sends its residual. A step whose sum is not finite is skipped by the loss scale on all ranks: then the
    residual does not change.

    Attributes:
        residual: the values that earlier steps have not sent.
        next_residual: the buffer to which the compression writes the values that this step does not send.

    Example:
        >>> feedback = ErrorFeedback((2,))
        >>> feedback.next_residual[:] = 0.25
        >>> feedback.end_step(np.ones(2))
        True
        >>> feedback.residual
        array([0.25, 0.25], dtype=float32)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.residual: Floats = np.zeros(shape, np.float32)
        self.next_residual: Floats = np.zeros(shape, np.float32)

    def end_step(self, total: NDArray[Any]) -> bool:
        """Ends a step with the sum ``total`` of all ranks; returns whether it is finite, so that the step counts."""
        finite = bool(np.isfinite(total).all())
        if finite:
            self.residual, self.next_residual = self.next_residual, self.residual
        return finite
