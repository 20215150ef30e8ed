"""The measurement of one step's gradients for the noise scale (``noise.py``): it reads them, and changes none."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Communicator
from choros.parallel.reduce.gradients import Gradient, GradientLayout, SparseRows
from choros.parallel.reduce.noise import Contribution, Estimate, NoiseProgress, updated


@final
class NoiseMeasurement:
    """The squared norms of a step's gradients, bucket by bucket: of this rank's before the sum, and of the sum."""

    def __init__(self, progress: NoiseProgress, layout: GradientLayout) -> None:
        self._progress, self._layout = progress, layout
        self._own: Any = 0.0
        self._sum: Any = 0.0

    def add_own(self, gradients: Sequence[Gradient] | None, factor: float) -> None:
        """Adds a bucket before its sum, to which this rank contributes ``gradients`` times ``factor``."""
        if gradients is not None:
            self._own += squared_norm(gradients) * (factor * factor)

    def add_sum(self, gradients: Sequence[Gradient]) -> None:
        """Adds a bucket after its sum."""
        self._sum += squared_norm(gradients)

    def done(self, communicator: Communicator) -> NoiseProgress:
        """Gathers 64 bytes of each rank, in the section of the step. Of the earlier estimates that with the most steps
        goes on, so that ranks that came later have the same.
        """
        share, earlier = self._progress.shares[self._layout], self._progress.estimates.get(self._layout, Estimate())
        own = np.array([float(self._own), *share, *earlier], np.float64)
        gathered = communicator.gather_bytes(own.view(np.uint8), [own.nbytes] * communicator.size)
        rows = gathered.view(np.float64).reshape(communicator.size, -1).tolist()
        before = max(Estimate(*row[4:]) for row in rows)
        norms, shares = [row[0] for row in rows], [Contribution(*row[1:4]) for row in rows]
        return self._progress.measured(self._layout, updated(before, norms, shares, float(self._sum)))


def squared_norm(gradients: Sequence[Gradient]) -> Any:
    """The sum of the squares of all elements: a number, or on a device one of its framework.

    >>> squared_norm([np.array([3.0, 4.0]), SparseRows(np.array([1, 1]), np.ones((2, 1)), shape=(2, 1))])
    29.0
    """
    return sum((_squares(each) for each in gradients), 0.0)


def _squares(gradient: Gradient) -> Any:
    if isinstance(gradient, SparseRows):
        gradient = gradient.merged().values
    if isinstance(gradient, np.ndarray):
        flat = gradient.reshape(-1)
        flat = flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # steps that overflow are left out
            return float(np.dot(flat, flat))
    adapter = adapter_of(gradient)
    wide = adapter.cast(adapter.stop_gradient(gradient), np.dtype(np.float32))
    return adapter.sum(wide * wide)
