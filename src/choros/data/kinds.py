"""The kinds of data sets: their interface, and how they are found without importing the packages that define them."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from importlib import import_module
from typing import Any, ClassVar, final

from choros.comm import ProcessSet, Request
from choros.data.epochs import EpochData, FixedData
from choros.data.rows import Part, Sharding, checked, count_rows, without_last_empty
from choros.parallel.objects import broadcast_object
from choros.parallel.structure import leaves

_ORDERS = Request("orders of data")


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
        """Returns an iterator of the batches of one epoch. A generator stays open: later calls go on with it."""
        return iter(data)

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


def share_orders(process_set: ProcessSet) -> None:
    """Gives the generators of the ranks' shards of torch ``DataLoader`` the states that they have on the first rank.
    From one, each iterator draws a number, too, and Keras begins fewer of them on a rank that has no row of the last
    batch. All ranks call it before an epoch, and before an evaluation.
    """
    module = sys.modules.get(f"{__package__}.data_loader")
    states = [] if module is None else module.generator_states()
    numbers = process_set.communicator.agree(_ORDERS, value=len(states))
    if module is not None and states and len({*numbers}) == 1:
        module.set_generator_states(broadcast_object(states, process_set.ranks[0], process_set=process_set))


#: The attribute of a shard that has the data set and the ``Sharding`` which it was made from.
_SOURCE = "_choros_source"
#: The attribute of a shard that has the epochs which it is the data of.
_EPOCHS = "_choros_epochs"


#: Each a module with an instance ``KIND``, which is imported with the first data set of its package's classes; besides,
#: ``array_data``.
_TABLE = (
    ("py_dataset", "keras", ("utils.PyDataset",)),
    ("tf_data", "tensorflow", ("data.Dataset",)),
    ("data_loader", "torch.utils.data", ("DataLoader",)),
    ("grain_data", "grain", ("MapDataset", "IterDataset", "DataLoader")),
)


def _module_of(data: Any) -> str:
    """The module of the kind of ``data``; that of arrays and iterables for data of no package in the table."""
    for module, name, classes in _TABLE:
        package: Any = sys.modules.get(name)
        if package and isinstance(data, tuple(reduce(getattr, path.split("."), package) for path in classes)):
            return module
    return "array_data"


def kind_of(data: Any) -> DataKind:
    """Returns the kind of ``data``.

    >>> type(kind_of([1, 2, 3])).__name__
    'ArrayKind'
    """
    kind: DataKind = import_module(f"choros.data.{_module_of(data)}").KIND
    return kind


def are_arrays(data: Any) -> bool:
    """Whether ``data`` is an array or a structure of arrays, not an iterable of batches.

    >>> import numpy as np
    >>> are_arrays((np.zeros(3), None)), are_arrays(iter([]))
    (True, False)
    """
    given = leaves(data)
    return _module_of(data) == "array_data" and bool(given) and all(hasattr(leaf, "shape") for leaf in given)


def shard_of(data: Any, sharding: Sharding, *, elastic: bool) -> Any:
    """Returns the shard of a process, whose epochs, if it has batches, ``epochs_of_shard`` finds. If ``elastic``, other
    processes read it, too, if they can.
    """
    kind = kind_of(data)
    if sharding.batch_size is None and not kind.has_batches:
        return kind.shard(data, sharding)
    if elastic and (epochs := kind.epochs(data, sharding)).doubt is None:
        return data_of(epochs)
    shard = kind.shard(data, sharding)
    object.__setattr__(shard, _SOURCE, (data, sharding))
    return shard


def data_of(epochs: EpochData) -> Any:
    """Returns ``epochs.data``, of which ``epochs_behind`` returns ``epochs``, as other processes can read them."""
    object.__setattr__(epochs.data, _EPOCHS, epochs)
    return epochs.data


def epochs_behind(data: Any) -> EpochData | None:
    """Returns the epochs of which ``data`` are the shard of this process; ``None`` if others cannot read them."""
    epochs: EpochData | None = getattr(data, _EPOCHS, None)
    return epochs


def epochs_of_shard(data: Any, part: Part) -> EpochData:
    """Returns the epochs of the data set of which ``choros.keras.shard`` has made ``data``."""
    if epochs := epochs_behind(data):
        return epochs
    if source := getattr(data, _SOURCE, None):
        return kind_of(source[0]).epochs(*source)
    doubt = (
        f"other ranks cannot read this rank's {type(data).__name__}. Pass all data to choros.keras.shard(…, "
        "batch_size=…), and what it returns, unchanged, to fit."
    )
    return FixedData(Sharding(part), lambda: data, doubt)
