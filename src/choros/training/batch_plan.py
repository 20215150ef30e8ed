"""Where the examples of a global batch lie on the devices of several processes: a pure plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BatchPlan"]


@dataclass(frozen=True)
class BatchPlan:
    """Where the examples of a global batch lie, on whichever process it is made.

    Attributes:
        examples: how many each process brings, in the order of the mesh.
        devices: how many devices each process has.

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
        """How many rows each device gets."""
        return max(-(-count // devices) for count, devices in zip(self.examples, self.devices, strict=True))

    @property
    def is_even(self) -> bool:
        """Whether every row is an example."""
        return sum(self.examples) == self.rows * sum(self.devices)

    def index(self) -> NDArray[np.int32]:
        """The rows that are examples."""
        starts = np.cumsum((0, *self.devices[:-1])) * self.rows
        ranges = [np.arange(start, start + count) for start, count in zip(starts, self.examples, strict=True)]
        return np.concatenate(ranges).astype(np.int32)
