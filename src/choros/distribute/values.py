"""Per-replica values of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from choros.parallel.structure import map_structure

__all__ = ["PerReplica", "per_replica", "select"]


@final
class PerReplica:
    """One value for each replica of this process: a result of ``strategy.run``, or a distributed batch.

    A process with one replica, the usual case, has plain values instead, as in ``tf.distribute``.

    Attributes:
        values: one for each replica of this process, in order.

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
    """Combines the values of this process's replicas: plain for one replica, else with ``PerReplica`` leaves.

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
    """Replaces every ``PerReplica`` in ``structure`` by the value of the local replica of this index."""
    return map_structure(lambda leaf: leaf.values[replica] if isinstance(leaf, PerReplica) else leaf, structure)
