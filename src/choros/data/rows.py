"""The rows of each global batch that belong to a process; a new order of them is the same on all processes.

One process would see the batches ``0 1 2 3 | 4 5 6 7 | 8 9``; two processes see the same ones together::

    process 0    0 1 . .   4 5 . .   8 .
    process 1    . . 2 3   . . 6 7   . 9

A batch's arrays may differ in numbers of rows, as unlabelled examples beside fewer labelled: each is cut by its own::

    batch           x 0 1 2 3 4 5   y 0 1 2
    process 0         0 1 2           0 1
    process 1               3 4 5         2
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of
from choros.errors import ConfigError
from choros.parallel.structure import leaves, map_structure
from choros.topology import shard_range

T = TypeVar("T")

_LATER = "; later batches may have fewer"
_LAST = "; only the last batch of a DataLoader may have fewer"
#: Whether arrays of a batch (may) have different numbers of rows.
_differ = False


@dataclass(frozen=True)
class Part:
    """The rows of each batch that belong to one process: those of ``local`` replicas of ``count``, from ``first`` on.

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

    def batches_of(self, number: int, full: int, last: int) -> int:
        """In how many of ``number`` batches, of ``full`` rows and one of ``last``, the process has rows."""
        if self.has_rows_of(last):
            return number
        return max(0, number - 1) if self.has_rows_of(full) else 0

    def of(self, batch: Any) -> Any:
        """Returns the process's rows of each array of ``batch``, maybe none; ``None`` stays ``None``."""
        return map_structure(lambda leaf: cut(leaf, *self.range(count_rows(leaf))), batch)


def count_rows(batch: Any) -> int:
    """The number of rows of a batch of arrays: of the one that has the most, of which a process has some if of any.

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


def common_rows(arrays: Any) -> int:
    """The number of rows that all arrays have; a ConfigError if they have different ones."""
    lengths = {np.shape(leaf)[:1] for leaf in leaves(arrays)}
    if len(lengths) != 1 or lengths == {()}:
        raise ConfigError(
            f"got a {type(arrays).__name__} of arrays with the lengths {sorted(lengths)}: expected arrays of one "
            "length, or a tf.data, PyDataset, DataLoader or Grain data set."
        )
    ((number,),) = lengths
    return int(number)


def note_rows(first: Any, *, may_differ: bool = False) -> None:
    """Notes, before any step and on all processes, whether the arrays of a batch (may) differ in their rows."""
    global _differ
    arrays = [leaf for leaf in leaves(first) if getattr(leaf, "shape", None)]
    rows = {leaf.shape[0] for leaf in arrays}
    _differ = _differ or may_differ or len(rows) > 1
    if len(rows) > 1 and any(_rows_numbered(each) in rows for each in arrays):
        warnings.warn(
            "an array of whole numbers in a batch looks like numbers of another array's rows, as of graphs that are "
            "merged into one: each array is cut by its own rows, so these numbers would be those of other ranks' rows. "
            "Pad each graph, so that a row of every array is an example, or let each rank make batches of its own "
            "(distribute_datasets_from_function).",
            stacklevel=2,
        )


def _rows_numbered(array: Any) -> int | None:
    """How many rows of another array those have of which ``array`` may have the numbers; ``None``: it has none."""
    try:
        host = adapter_of(array).to_host(array)
        number = int(host.max()) + 1 if host.dtype.kind in "iu" and host.size else None
        return None if number == len(host) else number
    except (RuntimeError, TypeError, ValueError):  # sparse or ragged
        return None


def rows_differ() -> bool:
    """Whether ``note_rows`` has noted such batches in this process."""
    return _differ


def cut(batch: Any, start: int, end: int) -> Any:
    """Returns the rows ``start … end - 1`` of every array of ``batch``; ``None`` stays ``None``."""
    return map_structure(lambda leaf: slice_rows(leaf, start, end), batch)


def slice_rows(leaf: Any, start: Any, end: Any) -> Any:
    """Returns rows ``start … end - 1`` of an array, also of a ragged or sparse tensor of TensorFlow."""
    if type(leaf).__name__ != "SparseTensor":
        return leaf[start:end]
    import tensorflow as tf

    rest = leaf.dense_shape[1:]
    first, number = (tf.cast(each, tf.int64)[None] for each in (start, end - start))
    rows = tf.sparse.slice(leaf, tf.concat([first, tf.zeros_like(rest)], 0), tf.concat([number, rest], 0))
    rows.set_shape([None, *leaf.shape[1:]])
    return rows


def check_global_batch(rows: int, replicas: int, advice: str = "") -> None:
    """Raises a ``ConfigError`` if a batch of ``rows`` examples has none for some replica; not for the last batch."""
    if rows < replicas:
        raise ConfigError(
            f"a global batch of {rows} examples is smaller than the {replicas} replicas over which it is sharded: the "
            f"batch size is that of all replicas together. Choose a batch size of {replicas} or more{advice}."
        )


def checked(batches: Iterable[T], replicas: int, count: Callable[[T], int], *, only_last: bool = False) -> Iterator[T]:
    """Yields ``batches`` with rows; the first (``only_last``: all but the last) must have some for every replica."""
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


def without_last_empty(parts: Iterable[Any]) -> Iterator[Any]:
    """Yields ``parts``, of which those without rows only if others follow: a process without any more batches joins.

    >>> [len(part) for part in without_last_empty(np.empty(rows) for rows in (1, 0, 2, 0, 0))]
    [1, 0, 2]
    """
    empty: list[Any] = []
    for part in parts:
        empty.append(part)
        if count_rows(part):
            yield from empty
            empty.clear()


@dataclass(frozen=True)
class Sharding:
    """How ``choros.keras.shard`` shards a data set: a new order each epoch is the same on all processes."""

    part: Part
    batch_size: int | None = None
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0


@lru_cache(maxsize=4)
def order_of(number: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of ``number`` examples in an epoch.

    >>> sorted(order_of(4, seed=1, epoch=0).tolist())
    [0, 1, 2, 3]
    """
    return np.random.default_rng((seed, epoch + 1)).permutation(number)  # counted from 1, as Keras prints them


def shuffled_batch(position: int, number: int, seed: int, epoch: int) -> int:
    """Returns the batch at a position in an epoch of ``number``; the last, which may be smaller, stays the last.

    >>> sorted(shuffled_batch(position, 4, seed=1, epoch=0) for position in range(3)), shuffled_batch(3, 4, 1, 0)
    ([0, 1, 2], 3)
    """
    return position if position == number - 1 else int(order_of(number - 1, seed, epoch)[position])


def batch_counts(n: int, batch_size: int) -> tuple[int, int, int]:
    """Returns the number of batches of ``n`` examples, the rows of a full one, and of the last one.

    >>> batch_counts(10, 4)
    (3, 4, 2)
    """
    return -(-n // batch_size), min(batch_size, n), (n - 1) % batch_size + 1


def example_indices(n: int, batch_size: int, part: Part) -> NDArray[np.int64]:
    """Returns the indices of a process's examples of ``n``, in order.

    >>> example_indices(10, 4, Part(first=1, count=2)).tolist()
    [2, 3, 6, 7, 9]
    """
    check_global_batch(batch_size, part.count)
    full, last = np.split(np.arange(n), [n - n % batch_size])
    start, end = part.range(batch_size)
    return np.concatenate([full.reshape(-1, batch_size)[:, start:end].ravel(), part.of(last)])
