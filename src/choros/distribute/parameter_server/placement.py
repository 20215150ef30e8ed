"""The placement of variables: a pure plan of which server stores which shard, identical in every process.

::

    variables        kernel (10 rows)              bias      scale
    sharded by       ┌────────┬────────┐          ┌────┐    ┌────┐
    the partitioner  │ 0 … 5  │ 5 … 10 │          │    │    │    │
                     └───┬────┴───┬────┘          └─┬──┘    └─┬──┘
    round robin        ps 0     ps 1              ps 0      ps 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.errors import ConfigError

__all__ = ["Placed", "Placement", "Shard", "SlotKey", "VariableKey", "place"]

Array = NDArray[Any]
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

    def of(self, value: Array) -> Array:
        """Returns this shard of the variable's ``value``."""
        return value if self.end is None else value[self.begin : self.end]


#: The key of each weight of a model, with the servers of its shards.
Placed = tuple[tuple[VariableKey, tuple[tuple[int, Shard], ...]], ...]


@dataclass(frozen=True)
class Placement:
    """The location of each variable.

    Attributes:
        servers: the shards of each server; the shards of one variable are in the order of their rows.
    """

    servers: tuple[tuple[Shard, ...], ...]

    @property
    def sharded(self) -> frozenset[VariableKey]:
        """The variables that are split into several shards."""
        return frozenset(shard.variable for shards in self.servers for shard in shards if shard.end is not None)

    def of(self, keys: Iterable[VariableKey]) -> Placed:
        """Returns where the variables ``keys`` are.

        Example:
            >>> Placement(((Shard((0, 0)),), (Shard((0, 1)),))).of([(0, 1)])
            (((0, 1), ((1, Shard(variable=(0, 1), begin=0, end=None)),)),)
        """
        found: dict[VariableKey, list[tuple[int, Shard]]] = {}
        for server, shards in enumerate(self.servers):
            for shard in shards:
                found.setdefault(shard.variable, []).append((server, shard))
        return tuple((key, tuple(found[key])) for key in keys)

    def with_placed(self, placed: Placed) -> Placement:
        """Returns this placement with the variables of another process that are not in it."""
        known = {shard.variable for shards in self.servers for shard in shards}
        new = [pair for key, pairs in placed if key not in known for pair in pairs]
        return Placement(
            tuple(
                (*shards, *(shard for on, shard in new if on == server)) for server, shards in enumerate(self.servers)
            )
        )

    def with_slots(self, slots: Iterable[SlotKey]) -> Placement:
        """Returns this placement with slots: each is sharded like its variable; an optimizer's own are on every server.

        Example:
            >>> placement = Placement(((Shard((0, 0), 0, 2),), (Shard((0, 0), 2, 3),)))
            >>> placement.with_slots([SlotKey(1, 0, (0, 0))]).servers[1]
            (Shard(variable=(0, 0), begin=2, end=3), Shard(variable=SlotKey(optimizer=1, index=0, variable=(0, 0)), \
begin=2, end=3))
        """
        slots_of: dict[VariableKey | None, list[SlotKey]] = {}
        for slot in slots:
            slots_of.setdefault(slot.variable, []).append(slot)
        return Placement(
            tuple(
                (
                    *shards,
                    *(replace(shard, variable=slot) for shard in shards for slot in slots_of.get(shard.variable, ())),
                    *map(Shard, slots_of.get(None, ())),
                )
                for shards in self.servers
            )
        )

    def split(self, values: Mapping[VariableKey, Array]) -> list[dict[Shard, Array]]:
        """Splits ``values`` into the shards of each server; variables may be missing."""
        return [
            {shard: shard.of(values[shard.variable]) for shard in shards if shard.variable in values}
            for shards in self.servers
        ]

    def join(self, parts: Sequence[Mapping[Shard, Array]]) -> dict[VariableKey, Array]:
        """Joins the servers' shards into the values of variables; of each variable, all shards are given or none."""
        shards_of: dict[VariableKey, list[tuple[int, Array]]] = {}
        for part in parts:
            for shard, value in part.items():
                shards_of.setdefault(shard.variable, []).append((shard.begin, value))
        return {
            key: found[0][1] if len(found) == 1 else np.concatenate([value for _, value in sorted(found, key=_begin)])
            for key, found in shards_of.items()
        }


def place(
    variables: Mapping[VariableKey, tuple[tuple[int, ...], str]],
    partition: Partition | None,
    servers: int,
    first: int = 0,
) -> Placement:
    """Returns the placement of one model's variables.

    Args:
        variables: the shape and dtype of each, in order.
        partition: a partitioner; ``None`` leaves variables whole.
        servers: the number of servers.
        first: the server that stores the first shard.

    Raises:
        ConfigError: the partitioner returns invalid shard counts.

    Example:
        >>> place({(0, 0): ((3, 2), "float32"), (0, 1): ((2,), "float32")}, None, servers=2).servers
        ((Shard(variable=(0, 0), begin=0, end=None),), (Shard(variable=(0, 1), begin=0, end=None),))
    """
    assigned: list[list[Shard]] = [[] for _ in range(servers)]
    server = first
    for key, (shape, dtype) in variables.items():
        for shard in _split_rows(key, shape, _count(shape, dtype, partition)):
            assigned[server % servers].append(shard)
            server += 1
    return Placement(tuple(map(tuple, assigned)))


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


def _split_rows(key: VariableKey, shape: tuple[int, ...], count: int) -> Iterator[Shard]:
    if count == 1:
        yield Shard(key)
        return
    rows, longer = divmod(shape[0], count)
    begin = 0
    for index in range(count):
        end = begin + rows + (index < longer)
        yield Shard(key, begin, end)
        begin = end


def _begin(part: tuple[int, Array]) -> int:
    return part[0]
