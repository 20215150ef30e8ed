"""Selective compression: some arrays are compressed, the others are sent uncompressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from choros.comm import Communicator
from choros.parallel.compression.casts import plain_dtype
from choros.parallel.reduce.exchange import Array, Exchange, Layout
from choros.parallel.reduce.fused import FusedExchange

__all__ = ["SelectiveExchange"]

Groups = list[list[int]]


@final
class SelectiveExchange(Exchange):
    """Sums the arrays at ``chosen`` by a compressing exchange, the others by an allreduce.

    Args:
        communicator: the ranks.
        layout: all arrays.
        groups: indices of arrays that are sent together.
        chosen: indices of the arrays to compress.
        compressing: creates the exchange of these from their layout and groups.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: Layout,
        groups: Sequence[Sequence[int]],
        chosen: Sequence[int],
        compressing: Callable[[Layout, Groups], Exchange],
    ) -> None:
        others = sorted(set(range(len(layout))) - set(chosen))
        self._count = len(layout)
        self._parts: list[tuple[Sequence[int], Exchange]] = []
        if chosen:
            self._parts.append((chosen, compressing(*_only(chosen, layout, groups))))
        if others:
            self._parts.append((others, FusedExchange(communicator, *_only(others, layout, groups), plain_dtype)))
        self.description = "; ".join(exchange.description for _, exchange in self._parts)

    def sum(self, arrays: Sequence[Array] | None, before: float, after: float) -> list[Array]:
        """See ``Exchange``."""
        results: dict[int, Array] = {}
        for indices, exchange in self._parts:
            own = None if arrays is None else [arrays[index] for index in indices]
            results.update(zip(indices, exchange.sum(own, before, after), strict=True))
        return [results[index] for index in range(self._count)]


def _only(indices: Sequence[int], layout: Layout, groups: Sequence[Sequence[int]]) -> tuple[Layout, Groups]:
    """Returns the layout of the arrays at ``indices``, and their groups with renumbered indices."""
    positions = {index: position for position, index in enumerate(indices)}
    parts = [[positions[index] for index in group if index in positions] for group in groups]
    return tuple(layout[index] for index in indices), [part for part in parts if part]
