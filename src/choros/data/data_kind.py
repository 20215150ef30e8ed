"""The interface of a kind of data sets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, final

from choros.data.epochs import EpochData, FixedData
from choros.data.rows import Part, Sharding, checked, count_rows, without_last_empty


@final
class LocalBatches:
    """A process's rows of each global batch, or their indices, maybe none, so that all processes have the same number
    of batches; each iteration starts anew if the source supports it.

        >>> batches = LocalBatches(lambda: iter(["first", "second"]), lambda: 2)
        >>> list(batches), len(batches)
        (['first', 'second'], 2)
    """

    def __init__(self, start: Callable[[], Iterator[Any]], length: Callable[[], int | None] = lambda: None) -> None:
        self._start, self._length = start, length

    def __iter__(self) -> Iterator[Any]:
        return self._start()

    def __len__(self) -> int:
        length = self._length()
        if length is None:
            raise TypeError("the number of batches of this data set is not known.")
        return length


class DataKind(ABC):
    """One kind of data set, of batches or examples. What has rows and is indexed like an array is no kind of its own:
    ``rows.py`` counts and cuts the rows of arrays, alone or in structures.

    A kind must implement ``shard``. The other methods work for all iterable data sets; a kind overrides those for which
    its data sets need, or allow, another implementation. ``shuffles``: whether ``shard`` can shuffle. ``has_batches``:
    whether its data sets have batches, which ``shard`` splits; others may have examples, of which it makes batches.
    ``augments``: whether what ``traits`` returns may differ where each process changes the same rows at random.
    ``own_rows``: the user's words for data of which each process has rows of its own.
    """

    shuffles: ClassVar[bool] = False
    has_batches: ClassVar[bool] = False
    augments: ClassVar[bool] = False
    own_rows: ClassVar[str] = "choros.keras"

    @abstractmethod
    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns this process's shard of ``data``, for ``choros.keras.shard``, of a class that Keras' ``fit`` takes.
        It begins the next order by itself, where ``epochs`` waits for ``begin_epoch``. Processes may get different
        numbers of batches. ConfigError: the batch size does not fit.
        """

    def split(self, data: Any, part: Part) -> Any:
        """Returns the process's rows of each batch, for ``fit`` under a strategy: a data set of the same kind, a
        generator if ``data`` is only iterable. Batches at the end in which it has none are left out, if that is known
        in time. ConfigError: no batches or too small ones, or their order may differ between processes.
        """
        if self.has_batches:
            return self.shard(data, Sharding(part))
        return without_last_empty(self.local_batches(data, lambda: part))

    def local_batches(self, data: Any, part: Callable[[], Part]) -> Any:
        """Returns the process's rows of each batch, maybe none, for a custom loop under a strategy: ``LocalBatches``,
        or a data set of the same kind; ConfigError as ``split``. ``part`` returns the process's part, which may change
        between two iterations.
        """

        def start() -> Iterator[Any]:
            own = part()
            return (own.of(batch) for batch in checked(self.batches(data), own.count, count_rows))

        return LocalBatches(start, lambda: self.length(data))

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of ``data``, of which any process can read any shard; all processes must call this."""
        doubt = (
            f"a {type(data).__name__} cannot be read again from its beginning. Pass arrays, a tf.data.Dataset, a "
            "PyDataset, a torch DataLoader or a Grain data set instead."
        )
        return FixedData(sharding, lambda: self.split(data, sharding.part), doubt)

    def batches(self, data: Any) -> Iterator[Any]:
        """Yields the batches of one epoch."""
        yield from data

    def length(self, data: Any) -> int | None:
        """Returns the number of batches; ``None`` if it is not known."""
        return len(data) if hasattr(data, "__len__") else None

    def batch_rows(self, data: Any) -> int | None:
        """Returns the number of rows of a full batch; ``None`` if data would have to be read."""
        return None

    def rows(self, data: Any) -> int | None:
        """Returns the number of rows in all batches; ``None`` if more than one would have to be read."""
        return count_rows(data[0]) if hasattr(data, "__getitem__") and self.length(data) == 1 else None

    def padded(self, own: Any) -> Any:
        """Returns ``own``, the data set of this process alone, with empty batches at its end, so that all processes,
        which must call this, have the same number of batches; ``None`` if the kind has no such data sets.
        """
        return None

    def traits(self, data: Any) -> Iterable[Any]:
        """Arrays that are equal on all processes if these read the same rows in the same order; none: not known."""
        return ()

    def sources(self, data: Any) -> Iterable[Any]:
        """Returns ``data`` and all data sets that it is derived from; empty if those are not known."""
        return ()
