"""Arrays concatenated to one vector, the interface of lossy vector sums, and the feedback of their errors."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from choros.comm import Communicator
from choros.comm.fusion import Layout
from choros.parallel.compression.compressor import SelectiveCompressor
from choros.parallel.reduce.exchange import Array, Exchange

Vector = NDArray[np.float32]


class VectorCompressor(SelectiveCompressor):
    """A compression of arrays that are concatenated to one float32 vector, which it sums with a rounding error.

    Attributes:
        feedback: whether the next step adds what the sum of this one lacks.
    """

    feedback: ClassVar[bool] = True

    @abstractmethod
    def sum(self, communicator: Communicator, vector: Vector, residual: Vector | None) -> Vector:
        """Returns the same sum on every rank, not finite if any vector is not; ``residual`` receives what it lacks."""

    def describe(self, count: int) -> str:
        """Returns how ``count`` numbers are sent: ranks compare it first."""
        return f"{self.name}[{count}]"

    @final
    def compressing(self, communicator: Communicator, layout: Layout) -> Exchange:
        """See ``SelectiveCompressor``."""
        return _VectorExchange(self, communicator, layout)


@final
class _VectorExchange(Exchange):
    def __init__(self, compressor: VectorCompressor, communicator: Communicator, layout: Layout) -> None:
        ends = list(accumulate((math.prod(shape) for shape, _ in layout), initial=0))
        self._compressor = compressor
        self._communicator = communicator
        self._layout = layout
        self._slices = [slice(*bounds) for bounds in pairwise(ends)]
        self._vector = np.zeros(ends[-1], np.float32)
        self._feedback = ErrorFeedback(self._vector.shape) if compressor.feedback else None
        self.description = compressor.describe(ends[-1])

    def sum(self, arrays: Sequence[Array] | None, before: float, after: float) -> list[Array]:
        """See ``Exchange``."""
        vector = self._vector
        if arrays is None:
            vector.fill(0)
        else:
            for array, part in zip(arrays, self._slices, strict=True):
                np.multiply(array.reshape(-1), before, out=vector[part], dtype=np.float32, casting="unsafe")
        if self._feedback is None:
            total = self._compressor.sum(self._communicator, vector, None)
        else:
            vector += self._feedback.residual
            total = self._compressor.sum(self._communicator, vector, self._feedback.next_residual)
            self._feedback.end_step(total)
        total *= np.float32(after)
        pairs = zip(self._slices, self._layout, strict=True)
        return [total[part].reshape(shape).astype(dtype) for part, (shape, dtype) in pairs]


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
