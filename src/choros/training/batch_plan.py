"""The plan of a global batch: which rows hold its examples on the devices of several processes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BatchPlan"]


@dataclass(frozen=True)
class BatchPlan:
    """The rows of a global batch that are examples; the same plan on every process.

    Attributes:
        examples: the number of examples that each process contributes, in the order of the mesh.
        devices: the number of devices of each process.

    Example:
        >>> plan = BatchPlan(examples=(3, 2), devices=(2, 2))
        >>> plan.rows, plan.is_even
        (2, False)
        >>> plan.index().tolist()
        [0, 1, 2, 4, 5]
    """

    examples: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of rows on each device."""
        return max(-(-count // devices) for count, devices in zip(self.examples, self.devices, strict=True))

    @property
    def is_even(self) -> bool:
        """Whether every row is an example."""
        return sum(self.examples) == self.rows * sum(self.devices)

    def index(self) -> NDArray[np.int32]:
        """The indices of the rows that are examples."""
        starts = np.cumsum((0, *self.devices[:-1])) * self.rows
        ranges = [np.arange(start, start + count) for start, count in zip(starts, self.examples, strict=True)]
        return np.concatenate(ranges).astype(np.int32)
