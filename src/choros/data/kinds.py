"""The kinds of data sets, found without importing the packages that define them; each has a module of its own, but
arrays in memory and iterables of batches, which are of no package. A list of arrays may be both: for ``shard`` each
array's rows are the examples, elsewhere each array is a batch.
"""

import sys
from collections.abc import Callable, Iterable
from functools import reduce
from importlib import import_module
from typing import Any, ClassVar, final

import numpy as np

from choros.data.data_kind import DataKind
from choros.data.epochs import EpochData, FixedData
from choros.data.rows import Part, Sharding, cut
from choros.errors import ConfigError
from choros.parallel.structure import leaves


@final
class ArrayKind(DataKind):
    """Arrays, or tuples, lists and dicts of them; and iterables of such batches."""

    shuffles: ClassVar[bool] = True

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns rows of the arrays; with a batch size a ``PyDataset``."""
        lengths = {np.shape(leaf)[:1] for leaf in leaves(data)}
        if len(lengths) != 1 or lengths == {()}:
            raise ConfigError(
                f"shard() got a {type(data).__name__} of arrays with the lengths {sorted(lengths)}. It takes arrays "
                "of one length, and tf.data, PyDataset, DataLoader and Grain data sets."
            )
        if sharding.batch_size is None:
            if sharding.shuffle:
                raise ConfigError("shuffle=True needs batch_size; without it the rows are sharded in their order.")
            ((n,),) = lengths
            return cut(data, *sharding.part.range(n))
        from choros.data.py_dataset import PartsDataset, array_epochs

        return PartsDataset(array_epochs(data, sharding.batch_size, sharding))

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of arrays in batches; iterables of batches can be read only once."""
        if sharding.batch_size is None:
            return super().epochs(data, sharding)
        from choros.data.py_dataset import array_epochs

        return array_epochs(data, sharding.batch_size, sharding)

    def traits(self, data: Any) -> Iterable[Any]:
        """Returns the arrays; of an iterable nothing is known."""
        return leaves(data) if are_arrays(data) else ()

    def local_batches(self, data: Any, part: Callable[[], Part]) -> Any:
        """Returns the process's rows of each batch of an iterable."""
        is_array = hasattr(data, "shape")
        if is_array or not isinstance(data, Iterable) or isinstance(data, (tuple, dict, str, bytes)):
            raise ConfigError(
                f"a {type(data).__name__} is no data set of batches. Strategies take tf.data.Dataset, PyDataset, torch "
                "DataLoader, Grain data sets and iterables of batches; split arrays into batches first."
            )
        return super().local_batches(data, part)


_ARRAYS = ArrayKind()
#: The attribute of a shard that has the data set and the ``Sharding`` which it was made from.
_SOURCE = "_choros_source"
#: The attribute of a shard that has the epochs which it is the data of.
_EPOCHS = "_choros_epochs"


#: Each a module with an instance ``KIND``, which is imported with the first data set of its package's classes.
_TABLE = (
    ("py_dataset", "keras", ("utils.PyDataset",)),
    ("tf_data", "tensorflow", ("data.Dataset",)),
    ("data_loader", "torch.utils.data", ("DataLoader",)),
    ("grain_data", "grain", ("MapDataset", "IterDataset", "DataLoader")),
)


def _module_of(data: Any) -> str | None:
    """The module of the kind of ``data``; ``None`` for data of no package in the table."""
    for module, name, classes in _TABLE:
        package: Any = sys.modules.get(name)
        if package and isinstance(data, tuple(reduce(getattr, path.split("."), package) for path in classes)):
            return module
    return None


def kind_of(data: Any) -> DataKind:
    """Returns the kind of ``data``; for data of no package in the table, the kind of arrays and iterables.

    >>> type(kind_of([1, 2, 3])).__name__
    'ArrayKind'
    """
    module = _module_of(data)
    kind: DataKind = _ARRAYS if module is None else import_module(f"choros.data.{module}").KIND
    return kind


def are_arrays(data: Any) -> bool:
    """Whether ``data`` is an array or a structure of arrays, not an iterable of batches.

    >>> import numpy as np
    >>> are_arrays((np.zeros(3), None)), are_arrays(iter([]))
    (True, False)
    """
    given = leaves(data)
    return _module_of(data) is None and bool(given) and all(hasattr(leaf, "shape") for leaf in given)


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
    """Returns ``epochs.data``, of which ``epochs_behind`` returns ``epochs`` if other processes can read them."""
    own = epochs.data
    if epochs.doubt is None:
        object.__setattr__(own, _EPOCHS, epochs)
    return own


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
