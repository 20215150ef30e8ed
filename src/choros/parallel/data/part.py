"""A process's part of each global batch: its rows.

The arrays of a batch may have different numbers of rows, such as unlabelled examples beside fewer labelled ones: each
is cut by its own::

    batch           x 0 1 2 3 4 5   y 0 1 2
    process 0         0 1 2           0 1
    process 1               3 4 5         2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from choros.errors import ConfigError
from choros.parallel.structure import leaves, map_structure
from choros.topology import shard_range

__all__ = [
    "Part",
    "check_global_batch",
    "checked",
    "count_rows",
    "cut",
    "note_rows",
    "rows_differ",
    "without_last_empty",
]

T = TypeVar("T")

_LATER = "; later batches may have fewer"
_LAST = "; only the last batch of a DataLoader may have fewer"
#: Kinds of batches that data sets of this program have.
_known: set[str] = set()


@dataclass(frozen=True)
class Part:
    """The rows of each batch that belong to one process: those of ``local`` consecutive replicas.

    Attributes:
        first: the process's first replica.
        count: the number of replicas of all processes, each of which has the rows of ``shard_range``.
        local: the number of replicas of the process.

    Example:
        >>> Part(first=2, count=4, local=2).range(10)
        (6, 10)
    """

    first: int
    count: int
    local: int = 1

    def range(self, rows: int) -> tuple[int, int]:
        """Returns ``(start, end)`` of the process's rows in a batch of ``rows`` rows."""
        start, _ = shard_range(rows, self.first, self.count)
        _, end = shard_range(rows, self.first + self.local - 1, self.count)
        return start, end

    def has_rows_of(self, rows: int) -> bool:
        """Whether the process has rows in a batch of ``rows`` rows."""
        start, end = self.range(rows)
        return end > start

    def of(self, batch: Any) -> Any:
        """Returns the process's rows of each array of ``batch``, maybe none; ``None`` stays ``None``."""
        return map_structure(lambda leaf: cut(leaf, *self.range(count_rows(leaf))), batch)


def count_rows(batch: Any) -> int:
    """The number of rows of a batch of arrays: of the one that has the most, of which a process has some if of any.

    Example:
        >>> import numpy as np
        >>> count_rows({"x": np.zeros((3, 2)), "y": None}), count_rows((np.zeros(2), np.zeros(5)))
        (3, 5)
    """
    arrays = leaves(batch) or [None]
    for each in arrays:
        if not getattr(each, "shape", None):
            raise ConfigError(
                f"a batch must be an array, or a tuple, list or dict of arrays, with one row per example; this one is "
                f"a {type(batch).__name__}{'' if each is batch else f' of a {type(each).__name__}'}."
            )
    return max(int(each.shape[0]) for each in arrays)


def note_rows(first: Any, *, may_differ: bool = False) -> None:
    """Notes, before any step and on all processes, whether the arrays of a batch have different numbers of rows.

    Args:
        first: the first global batch of a data set; or ``None``.
        may_differ: whether they have, or may have, where this is known without a batch.
    """
    if may_differ or len({leaf.shape[0] for leaf in leaves(first) if getattr(leaf, "shape", None)}) > 1:
        _known.add("different rows")


def rows_differ() -> bool:
    """Whether ``note_rows`` has noted such batches in this process."""
    return bool(_known)


def cut(batch: Any, start: int, end: int) -> Any:
    """Returns the rows ``start … end - 1`` of every array of ``batch``; ``None`` stays ``None``."""
    return map_structure(lambda leaf: leaf[start:end], batch)


def check_global_batch(rows: int, replicas: int, advice: str = "") -> None:
    """Raises a ``ConfigError`` if a batch of ``rows`` examples has none for some replica; not for the last batch."""
    if rows < replicas:
        raise ConfigError(
            f"a global batch of {rows} examples is smaller than the {replicas} replicas over which it is sharded: the "
            f"batch size is that of all replicas together. Choose a batch size of {replicas} or more{advice}."
        )


def checked(batches: Iterable[T], replicas: int, count: Callable[[T], int], *, only_last: bool = False) -> Iterator[T]:
    """Yields the ``batches`` that have rows; the first must have some for every replica, unless it is the only one.

    Args:
        batches: global batches.
        replicas: the number of replicas.
        count: returns the number of rows of a batch.
        only_last: whether all others must, too, except the last. Otherwise they may be smaller, such as the remainder
            of a data set that is repeated.

    Raises:
        ConfigError: a batch is too small.
    """
    rows: int | None = None
    for batch in batches:
        if rows is not None:
            check_global_batch(rows, replicas, _LAST if only_last else _LATER)
        own = count(batch)
        if rows is None:
            note_rows(batch)
        if own:
            rows = own if rows is None or only_last else replicas
            yield batch


def without_last_empty(parts: Iterable[T], count: Callable[[T], int]) -> Iterator[T]:
    """Yields ``parts``, of which those without rows only if others follow: a process without any more batches joins.

    Example:
        >>> list(without_last_empty([[1], [], [2], [], []], len))
        [[1], [], [2]]
    """
    empty: list[T] = []
    for part in parts:
        empty.append(part)
        if count(part):
            yield from empty
            empty.clear()
