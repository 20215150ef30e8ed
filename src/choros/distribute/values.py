"""A value that differs between the replicas of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from choros.parallel.structure import map_structure

__all__ = ["PerReplica", "per_replica", "select"]


@final
class PerReplica:
    """What each replica of this process has: the result of ``strategy.run``, or a batch that was dealt out.

    A process with one replica, which is the rule, has plain values in its place, as in ``tf.distribute``.

    Attributes:
        values: one for each replica of this process, in their order.

    Example:
        >>> PerReplica((1.0, 3.0)).values
        (1.0, 3.0)
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(f'{index}: {value!r}' for index, value in enumerate(self.values))})"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def per_replica(values: Sequence[Any]) -> Any:
    """The values of this process's replicas as one value: plain if there is one replica, else of ``PerReplica`` leaves.

    Example:
        >>> per_replica([{"x": 1}, {"x": 2}])
        {'x': PerReplica(0: 1, 1: 2)}
    """
    first = values[0]
    if len(values) == 1 or first is None:
        return first
    if isinstance(first, dict):
        return type(first)((key, per_replica([value[key] for value in values])) for key in first)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(per_replica, zip(*values, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(map(per_replica, zip(*values, strict=True)))
    return PerReplica(values)


def select(replica: int, structure: Any) -> Any:
    """``structure`` as the local replica sees it: every ``PerReplica`` in it gives way to that replica's value."""
    return map_structure(lambda leaf: leaf.values[replica] if isinstance(leaf, PerReplica) else leaf, structure)
