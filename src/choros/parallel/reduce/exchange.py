"""The interface between the reducer and compression: an exchange sums arrays over the ranks."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, final

from choros.comm.fusion import Layout


class Exchange(Protocol):
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

    def sum_into(
        self, out: Sequence[Any] | None, arrays: Sequence[Any] | None, before: float, after: float
    ) -> list[Any]:
        """``sum``, which may write the results into ``out``, maybe ``arrays`` themselves, and return these."""
        del out
        return self.sum(arrays, before, after)


@final
class SplitExchange(Exchange):
    """An exchange of several: sums the arrays of each part by an exchange of its own; every array is in one part."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], Exchange]]) -> None:
        self._parts = parts
        self.description = "; ".join(exchange.description for _, exchange in parts)

    def sum(self, arrays: Sequence[Any] | None, before: float, after: float) -> list[Any]:
        """See ``Exchange``."""
        results: dict[int, Any] = {}
        for indices, exchange in self._parts:
            own = None if arrays is None else [arrays[index] for index in indices]
            results.update(zip(indices, exchange.sum(own, before, after), strict=True))
        return [results[index] for index in range(len(results))]


def only(indices: Sequence[int], layout: Layout, groups: Sequence[Sequence[int]]) -> tuple[Layout, list[list[int]]]:
    """Returns the layout of the arrays at ``indices``, and their groups with renumbered indices.

    >>> only([0, 2], ("a", "b", "c"), [[0, 1], [2]])
    (('a', 'c'), [[0], [1]])
    """
    positions = {index: position for position, index in enumerate(indices)}
    parts = [[positions[index] for index in group if index in positions] for group in groups]
    return tuple(layout[index] for index in indices), [part for part in parts if part]
