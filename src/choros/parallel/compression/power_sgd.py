"""The PowerSGD compression: matrices are sent as two factors of low rank.

A step, for the matrix M of each rank, its gradient plus the residual; Q is the same on all ranks::

    P = Σ M Q            allreduce of n × r numbers, for all matrices in one message
    P = orthonormal(P)   the same on all ranks
    Q = Σ Mᵀ P           allreduce of m × r numbers: likewise
    P Qᵀ ≈ Σ M           the result; the residual of a rank is M − P Pᵀ M
    Q                    the start of the next step: each step is one power iteration
"""

import math
from typing import final

import numpy as np
from numpy.typing import NDArray

from choros.comm import Array, Communicator, DType
from choros.comm.fusion import Layout
from choros.errors import ConfigError
from choros.parallel.compression.compressor import ErrorFeedback, SelectiveCompressor, is_floating, plain_dtype
from choros.parallel.reduce.exchange import Exchange, FusedExchange, Given

Matrix = NDArray[np.float32]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns ``shape`` as a matrix, split at the axis that gives the smallest factors: in any order of dimensions.

    >>> matrix_shape((3, 3, 32, 64)), matrix_shape((64, 32, 3, 3)), matrix_shape((10,))
    ((288, 64), (64, 288), (1, 10))
    """
    splits = ((math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(len(shape)))
    return min(splits, key=sum, default=(1, 1))


def _orthonormal(matrix: Matrix) -> Matrix:
    """Returns orthonormal columns that span those of ``matrix``, also if it is 0."""
    columns: Matrix = np.linalg.qr(matrix)[0]
    return columns


@final
class _PowerExchange(Exchange):
    def __init__(self, communicator: Communicator, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._shapes = [matrix_shape(shape) for shape, _ in layout]
        self._feedback = [ErrorFeedback(shape) for shape in self._shapes]
        generator = np.random.default_rng(0)  # The same on every rank.
        self._right = [
            _orthonormal(generator.standard_normal((columns, rank), np.float32)) for _, columns in self._shapes
        ]
        float32, together = np.dtype(np.float32), [range(len(layout))]
        sums = [
            FusedExchange(communicator, tuple(((side, rank), float32) for side in sides), together, plain_dtype)
            for sides in zip(*self._shapes, strict=True)
        ]
        self._sum_left, self._sum_right = sums
        self.description = f"rank {rank} of {', '.join(f'float32[{n}, {m}]' for n, m in self._shapes)}"

    def sum(self, arrays: Given, before: float, after: float, out: Given = None) -> list[Array]:
        del out
        matrices = [feedback.residual.copy() for feedback in self._feedback]
        if arrays is not None:
            for matrix, array in zip(matrices, arrays, strict=True):
                matrix += np.multiply(array.reshape(matrix.shape), before, dtype=np.float32, casting="unsafe")

        left = self._sum_left.sum([m @ right for m, right in zip(matrices, self._right, strict=True)], 1.0, 1.0)
        left = [_orthonormal(factor) for factor in left]
        own = [m.T @ factor for m, factor in zip(matrices, left, strict=True)]
        right = self._sum_right.sum(own, 1.0, 1.0)

        for index, feedback in enumerate(self._feedback):
            np.subtract(matrices[index], left[index] @ own[index].T, out=feedback.next_residual)
            if feedback.end_step(right[index]):
                self._right[index] = _orthonormal(right[index])
        return [
            (p @ q.T * np.float32(after)).reshape(shape).astype(dtype, copy=False)
            for p, q, (shape, dtype) in zip(left, right, self._layout, strict=True)
        ]


@final
class PowerSGD(SelectiveCompressor):
    """Gradients of n × m matrices, kernels too, are sent as factors of a low ``rank``: one power iteration per step,
    error feedback. They need ``4 * rank * (n + m)`` bytes, not ``4 * n * m``; arrays that would not halve are sent as
    they are. Vogels et al. 2019 (arXiv:1905.13727). Ranks' results agree if their libraries factorise identically.
    """

    name = "power_sgd"
    shares_state = True  # the factors of the last step

    def __init__(self, rank: int = 4) -> None:
        if rank < 1 or rank % 1:
            raise ConfigError(f"power_sgd(rank={rank}): expected a whole rank of 1 or more, such as 4.")
        self.rank = int(rank)

    def compresses(self, shape: tuple[int, ...], dtype: DType) -> bool:
        """See ``SelectiveCompressor``."""
        return is_floating(dtype) and 2 * self.rank * sum(matrix_shape(shape)) < math.prod(shape)

    def compressing(self, communicator: Communicator, layout: Layout) -> Exchange:
        """See ``SelectiveCompressor``."""
        return _PowerExchange(communicator, layout, self.rank)
