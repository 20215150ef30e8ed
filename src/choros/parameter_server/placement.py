"""The placement of variables: a pure plan of which server stores which shard, which the chief makes for all.

::

    variables        kernel (10 rows)              bias      scale
    sharded by       ┌────────┬────────┐          ┌────┐    ┌────┐
    the partitioner  │ 0 … 5  │ 5 … 10 │          │    │    │    │
                     └───┬────┴───┬────┘          └─┬──┘    └─┬──┘
    round robin        ps 0     ps 1              ps 0      ps 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from choros.comm import Array
from choros.errors import ConfigError
from choros.parallel.reduce.gradients import SparseRows
from choros.topology import shard_range

Partition = Callable[[tuple[int, ...], str], Sequence[int]]


@dataclass(frozen=True)
class SlotKey:
    """An optimizer's slot: the ``index``-th of ``variable``, or of the optimizer itself if ``None``; see ``Slots``."""

    optimizer: int
    index: int
    variable: VariableKey | None = None


#: A model's number and the index of its variable, or an optimizer's slot.
VariableKey = tuple[int, int] | SlotKey


@dataclass(frozen=True)
class Shard:
    """Rows ``begin`` to ``end`` of a variable, or all of it if ``end`` is ``None``."""

    variable: VariableKey
    begin: int = 0
    end: int | None = None

    @property
    def is_count(self) -> bool:
        """Whether it is an optimizer's count of updates, the first slot of its own."""
        return isinstance(self.variable, SlotKey) and self.variable.index == 0 and self.variable.variable is None


#: Where variables are: of each, its shards in the order of rows, with the number of their server.
Placement = Mapping[VariableKey, tuple[tuple[int, Shard], ...]]


def place(
    variables: Mapping[VariableKey, tuple[tuple[int, ...], str]],
    partition: Partition | None,
    servers: int,
    first: int = 0,
) -> Placement:
    """Returns the placement of one model's variables, by shape and dtype; ``first`` stores the first shard.

    >>> place({(0, 0): ((3, 2), "float32"), (0, 1): ((2,), "float32")}, None, servers=2)[0, 1]
    ((1, Shard(variable=(0, 1), begin=0, end=None)),)
    """
    round_robin = itertools.count(first)
    return {
        key: tuple(
            (next(round_robin) % servers, shard) for shard in _split_rows(key, shape, _count(shape, dtype, partition))
        )
        for key, (shape, dtype) in variables.items()
    }


def place_slots(slots: Iterable[SlotKey], placement: Placement, servers: int) -> Placement:
    """Returns the placement of slots: each is sharded like its variable; an optimizer's own are on every server.

    >>> placement = {(0, 0): ((0, Shard((0, 0), 0, 2)), (1, Shard((0, 0), 2, 3)))}
    >>> place_slots([slot := SlotKey(1, 0, (0, 0))], placement, servers=2)[slot][1]
    (1, Shard(variable=SlotKey(optimizer=1, index=0, variable=(0, 0)), begin=2, end=3))
    """
    return {
        slot: tuple((server, Shard(slot)) for server in range(servers))
        if slot.variable is None
        else tuple((server, replace(shard, variable=slot)) for server, shard in placement[slot.variable])
        for slot in slots
    }


def split(values: Mapping[VariableKey, Any], placement: Placement) -> dict[int, dict[Shard, Any]]:
    """Splits ``values`` into the shards of the servers that store any of them."""
    parts: dict[int, dict[Shard, Any]] = {}
    for key, value in values.items():
        for server, shard in placement[key]:
            part = value if shard.end is None else _rows(value, shard.begin, shard.end)
            parts.setdefault(server, {})[shard] = part
    return parts


def join(key: VariableKey, placement: Placement, values: Mapping[Shard, Array]) -> Array:
    """Joins the shards of a variable, which are all in ``values``."""
    shards = [shard for _, shard in placement[key]]
    if shards[0].end is None:
        return values[shards[0]]
    return np.concatenate([values[shard] for shard in shards])


def _rows(value: Any, begin: int, end: int) -> Any:
    """Returns rows ``begin`` to ``end`` of an array, or of a sparse gradient, which numbers them from 0.

    >>> _rows(SparseRows(np.array([4, 1, 4]), np.array([[1.0], [2.0], [3.0]]), shape=(6, 1)), 3, 6).indices
    array([1, 1])
    """
    if not isinstance(value, SparseRows):
        return value[begin:end]
    inside = (begin <= value.indices) & (value.indices < end)
    return SparseRows(value.indices[inside] - begin, value.values[inside], (end - begin, *value.shape[1:]))


def _count(shape: tuple[int, ...], dtype: str, partition: Partition | None) -> int:
    if partition is None or not shape or math.prod(shape) == 0:
        return 1
    counts = list(partition(shape, dtype))
    if len(counts) != len(shape) or any(count != 1 for count in counts[1:]) or not 1 <= counts[0] <= shape[0]:
        raise ConfigError(
            f"the variable_partitioner returned {counts} for a variable of shape {shape}: it must return one number "
            f"per dimension: the number of shards, from 1 to {shape[0]}, then ones, because variables are sharded "
            "along the first axis only."
        )
    return counts[0]


def _split_rows(key: VariableKey, shape: tuple[int, ...], count: int) -> list[Shard]:
    if count == 1:
        return [Shard(key)]
    return [Shard(key, *shard_range(shape[0], index, count)) for index in range(count)]
