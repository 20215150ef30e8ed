"""What choros asks of a kind of data set; each implementation is a module of its own, found by ``kinds.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from choros.parallel.data.part import Part, checked, count_rows

__all__ = ["DataKind", "LocalBatches", "Sharding"]


@dataclass(frozen=True)
class Sharding:
    """How Horovod's ``shard`` is to split a data set.

    Attributes:
        part: which rows of each global batch are the process's.
        batch_size: examples in a global batch; ``None`` where none was given.
        shuffle: whether examples are drawn in a new order each epoch, the same on all processes.
        seed: of that order, and of samplers that have none of their own.
        epoch: the one whose order comes first.
    """

    part: Part
    batch_size: int | None = None
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class LocalBatches:
    """A process's rows of each global batch, maybe none, so that all processes have equally many batches.

    Attributes:
        start: starts an iteration.
        length: gives the number of batches, ``None`` where it is not known.
        dataset: a data set of the same kind that yields them, if the kind has such.
    """

    start: Callable[[], Iterator[Any]]
    length: Callable[[], int | None]
    dataset: Any = None


class DataKind(ABC):
    """One kind of data set. Every method is given a data set of that kind.

    A kind must have ``shard``. The other methods do for all data sets that can be iterated; a kind overrides those that
    its data sets do in another way, or better.

    Attributes:
        shuffles: whether ``shard`` can shuffle.
    """

    shuffles: ClassVar[bool] = False

    @abstractmethod
    def shard(self, data: Any, sharding: Sharding) -> Any:
        """This process's part of ``data``, for Horovod's ``shard``.

        Processes may get different numbers of batches.

        Raises:
            ConfigError: the batch size does not fit ``data``.
        """

    def split(self, data: Any, part: Part) -> Any:
        """The process's rows of each batch, without batches in which it has none, for ``fit`` under a strategy.

        Returns:
            Something of the same kind; a generator of what is only iterable. Lengths that are known stay so.

        Raises:
            ConfigError: ``data`` has no batches or too small ones, or processes would not see them in the same order.
        """
        own = self.local_batches(data, part)
        return (rows for rows in own.start() if count_rows(rows) > 0)

    def local_batches(self, data: Any, part: Part) -> LocalBatches:
        """The process's rows of each batch, maybe none, for a custom loop under a strategy.

        Raises:
            ConfigError: as ``split``.
        """
        return LocalBatches(
            lambda: (part.of(batch) for batch in checked(self.batches(data), part.count, count_rows)),
            lambda: self.length(data),
        )

    def batches(self, data: Any) -> Iterator[Any]:
        """The batches of one epoch."""
        yield from data

    def length(self, data: Any) -> int | None:
        """The number of batches, ``None`` where it is not known."""
        return len(data) if hasattr(data, "__len__") else None

    def batch_rows(self, data: Any) -> int | None:
        """The rows of a full batch, ``None`` where finding out would consume data."""
        return None

    def padded(self, own: Any) -> Any:
        """``own``, the data set of this process alone, with batches of no rows at the end.

        There are as many as it takes for all processes to have equally many batches. All processes must call this.

        Returns:
            Something of the same kind; ``None`` if the kind has no such data sets.
        """
        return None

    def sources(self, data: Any) -> Iterable[Any]:
        """``data`` and all data sets that it was made from; none where that cannot be found out."""
        return ()
