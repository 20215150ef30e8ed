"""An exchange of several: each sums some of the arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from choros.parallel.reduce.exchange import Exchange, Layout

__all__ = ["Groups", "SplitExchange", "only"]

Groups = list[list[int]]


@final
class SplitExchange(Exchange):
    """Sums the arrays of each part by an exchange of its own.

    Args:
        parts: the indices of the arrays of each part, and their exchange; every array is in one part.
    """

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


def only(indices: Sequence[int], layout: Layout, groups: Sequence[Sequence[int]]) -> tuple[Layout, Groups]:
    """Returns the layout of the arrays at ``indices``, and their groups with renumbered indices.

    Example:
        >>> only([0, 2], ("a", "b", "c"), [[0, 1], [2]])
        (('a', 'c'), [[0], [1]])
    """
    positions = {index: position for position, index in enumerate(indices)}
    parts = [[positions[index] for index in group if index in positions] for group in groups]
    return tuple(layout[index] for index in indices), [part for part in parts if part]
