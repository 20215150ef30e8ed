"""Selective compression: some arrays are compressed, the others are sent uncompressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from choros.comm import Communicator
from choros.parallel.compression.casts import plain_dtype
from choros.parallel.reduce.exchange import Exchange, Layout
from choros.parallel.reduce.fused import FusedExchange
from choros.parallel.reduce.split import Groups, SplitExchange, only

__all__ = ["selective_exchange"]


def selective_exchange(
    communicator: Communicator,
    layout: Layout,
    groups: Sequence[Sequence[int]],
    chosen: Sequence[int],
    compressing: Callable[[Layout, Groups], Exchange],
) -> Exchange:
    """Returns an exchange that sums the arrays at ``chosen`` by a compressing exchange, the others by an allreduce.

    Args:
        communicator: the ranks.
        layout: all arrays.
        groups: indices of arrays that are sent together.
        chosen: indices of the arrays to compress.
        compressing: creates the exchange of these from their layout and groups.
    """
    others = sorted(set(range(len(layout))) - set(chosen))
    parts: list[tuple[Sequence[int], Exchange]] = []
    if chosen:
        parts.append((chosen, compressing(*only(chosen, layout, groups))))
    if others:
        parts.append((others, FusedExchange(communicator, *only(others, layout, groups), plain_dtype)))
    return SplitExchange(parts)
