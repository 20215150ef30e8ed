"""The interface between the reducer and compression: an exchange sums arrays over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from choros.comm.fusion import Layout

__all__ = ["Array", "Exchange", "Layout"]

Array = NDArray[Any]


class Exchange(ABC):
    """Sums arrays of one layout over the ranks of one communicator; created once, used in every step.

    All ranks call ``sum`` within the exclusive section in which they have agreed on the step. It owns the state that it
    keeps from step to step (buffers, the residual of a compression).

    Attributes:
        description: how it sums. Ranks compare it before the first byte is sent.
    """

    description: str

    @abstractmethod
    def sum(self, arrays: Sequence[Any] | None, before: float, after: float) -> list[Any]:
        """Returns the sum over the ranks of ``arrays * before``, times ``after``.

        Args:
            arrays: this rank's, which are not written to: host arrays, tensors on a device or ``SparseRows``, as the
                exchange takes them. ``None`` for zeros, of a rank that has no gradients.
            before: the factor of this rank's arrays: its share of the examples.
            after: the factor of the sum, the same on every rank.

        Returns:
            New arrays of the layout's shapes and dtypes, the same on every rank.
        """

    def sum_into(self, out: Sequence[Any], arrays: Sequence[Any], before: float, after: float) -> list[Any]:
        """``sum``, which may write the results into ``out``, maybe ``arrays`` themselves, and return these."""
        del out
        return self.sum(arrays, before, after)
