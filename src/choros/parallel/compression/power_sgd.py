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
from choros.comm.fusion import Exchange, Given, Layout, fused_exchange
from choros.errors import ConfigError
from choros.parallel.compression.compressor import ErrorFeedback, SelectiveCompressor, is_floating, plain_dtype

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


def _power_exchange(communicator: Communicator, layout: Layout, rank: int) -> Exchange:
    shapes = [matrix_shape(shape) for shape, _ in layout]
    feedbacks = [ErrorFeedback(shape) for shape in shapes]
    generator = np.random.default_rng(0)  # The same on every rank.
    last = [_orthonormal(generator.standard_normal((columns, rank), np.float32)) for _, columns in shapes]
    float32, together = np.dtype(np.float32), [range(len(layout))]
    sum_left, sum_right = (
        fused_exchange(communicator, tuple(((side, rank), float32) for side in sides), together, plain_dtype).sum
        for sides in zip(*shapes, strict=True)
    )

    def reduce(arrays: Given, before: float, after: float, _: Given = None) -> list[Array]:
        matrices = [feedback.residual.copy() for feedback in feedbacks]
        if arrays is not None:
            for matrix, array in zip(matrices, arrays, strict=True):
                matrix += np.multiply(array.reshape(matrix.shape), before, dtype=np.float32, casting="unsafe")

        left = sum_left([m @ right for m, right in zip(matrices, last, strict=True)], 1.0, 1.0)
        left = [_orthonormal(factor) for factor in left]
        own = [m.T @ factor for m, factor in zip(matrices, left, strict=True)]
        right = sum_right(own, 1.0, 1.0)

        for index, feedback in enumerate(feedbacks):
            np.subtract(matrices[index], left[index] @ own[index].T, out=feedback.next_residual)
            if feedback.end_step(right[index]):
                last[index] = _orthonormal(right[index])
        return [
            (p @ q.T * np.float32(after)).reshape(shape).astype(dtype, copy=False)
            for p, q, (shape, dtype) in zip(left, right, layout, strict=True)
        ]

    return Exchange(f"rank {rank} of {', '.join(f'float32[{n}, {m}]' for n, m in shapes)}", reduce)


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
        return _power_exchange(communicator, layout, self.rank)
