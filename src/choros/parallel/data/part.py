"""Which rows of a global batch are a process's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from choros.errors import ConfigError
from choros.parallel.structure import leaves, map_structure
from choros.topology import shard_range

__all__ = ["Part", "check_global_batch", "checked", "count_rows", "cut"]

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """The rows that one process takes of each batch: those of ``local`` replicas in a row.

    Attributes:
        first: the process's first replica.
        count: the replicas of all processes, each of which gets the rows of ``shard_range``.
        local: how many replicas the process has.

    Example:
        >>> Part(first=2, count=4, local=2).range(10)
        (6, 10)
    """

    first: int
    count: int
    local: int = 1

    def range(self, rows: int) -> tuple[int, int]:
        """The ``(start, end)`` of the process's rows in a batch of so many."""
        start, _ = shard_range(rows, self.first, self.count)
        _, end = shard_range(rows, self.first + self.local - 1, self.count)
        return start, end

    def of(self, batch: Any) -> Any:
        """The process's rows of ``batch``, maybe none."""
        return cut(batch, *self.range(count_rows(batch)))


def count_rows(batch: Any) -> int:
    """How many rows a batch of arrays has.

    Example:
        >>> import numpy as np
        >>> count_rows({"x": np.zeros((3, 2)), "y": None})
        3
    """
    first = next(iter(leaves(batch)), None)
    shape = getattr(first, "shape", None)
    if not shape:
        raise ConfigError(
            f"a batch must be an array, or a tuple, list or dict of arrays with a row for each example; this one is a "
            f"{type(batch).__name__}{'' if first is batch else f' of a {type(first).__name__}'}."
        )
    return int(shape[0])


def cut(batch: Any, start: int, end: int) -> Any:
    """The rows from ``start`` to before ``end`` of every array of ``batch``; ``None`` stays."""
    return map_structure(lambda leaf: leaf[start:end], batch)


def check_global_batch(rows: int, replicas: int) -> None:
    """A ``ConfigError`` if a batch of ``rows`` examples, other than the last, has none for some replica."""
    if rows < replicas:
        raise ConfigError(
            f"a global batch of {rows} examples is smaller than the {replicas} replicas that are to share it: batches "
            f"are those of all replicas together. Take a batch size of {replicas} or more."
        )


def checked(batches: Iterable[T], replicas: int, count: Callable[[T], int]) -> Iterator[T]:
    """``batches`` as they come; a ``ConfigError`` when one that was too small turns out not to be the last."""
    last: int | None = None
    for batch in batches:
        if last is not None:
            check_global_batch(last, replicas)
        last = count(batch)
        yield batch
