"""The kinds of data sets, found without importing the packages that define them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

from choros.parallel.data.arrays import ArrayKind
from choros.parallel.data.epochs import EpochData, FixedData
from choros.parallel.data.kind import DataKind
from choros.parallel.data.part import Part
from choros.parallel.data.sharding import Sharding
from choros.parallel.structure import leaves

__all__ = [
    "are_arrays",
    "data_of",
    "elastic_shard",
    "epochs_behind",
    "epochs_of",
    "epochs_of_shard",
    "kind_of",
    "remember_source",
]

#: The attribute of a shard that has the data set and the ``Sharding`` which it was made from.
_SOURCE = "_choros_source"
#: The attribute of a shard that has the epochs which it is the data of.
_EPOCHS = "_choros_epochs"


@dataclass(frozen=True)
class _KindEntry:
    """A kind of data set that a package defines.

    Attributes:
        module: a module beside this one, whose ``KIND`` is the kind; imported with the first such data set.
        package: the package, which is imported already if such a data set exists.
        classes: the classes of the data sets, as paths inside ``package``.
    """

    module: str
    package: str
    classes: tuple[str, ...]

    def has(self, data: Any) -> bool:
        """Whether ``data`` is an instance of one of the classes."""
        package: Any = sys.modules.get(self.package)
        if package is None:
            return False
        return isinstance(data, tuple(reduce(getattr, path.split("."), package) for path in self.classes))

    def kind(self) -> DataKind:
        """Returns the kind."""
        kind: DataKind = import_module(f"choros.parallel.data.{self.module}").KIND
        return kind


_TABLE = (
    _KindEntry("py_dataset", "keras", ("utils.PyDataset",)),
    _KindEntry("tf_data", "tensorflow", ("data.Dataset",)),
    _KindEntry("data_loader", "torch.utils.data", ("DataLoader",)),
    _KindEntry("grain_data", "grain", ("MapDataset", "IterDataset", "DataLoader")),
)
_ARRAYS = ArrayKind()


def kind_of(data: Any) -> DataKind:
    """Returns the kind of ``data``; for data of no package in the table, the kind of arrays and iterables.

    Example:
        >>> type(kind_of([1, 2, 3])).__name__
        'ArrayKind'
    """
    return next((entry.kind() for entry in _TABLE if entry.has(data)), _ARRAYS)


def are_arrays(data: Any) -> bool:
    """Whether ``data`` is an array or a structure of arrays, not an iterable of batches.

    Example:
        >>> import numpy as np
        >>> are_arrays((np.zeros(3), None)), are_arrays(iter([]))
        (True, False)
    """
    given = leaves(data)
    return kind_of(data) is _ARRAYS and bool(given) and all(hasattr(leaf, "shape") for leaf in given)


def remember_source(shard: Any, data: Any, sharding: Sharding) -> Any:
    """Lets ``epochs_of_shard`` find the data set of which ``shard`` is made, if it has batches; returns ``shard``."""
    if sharding.batch_size is not None or kind_of(data).has_batches:
        object.__setattr__(shard, _SOURCE, (data, sharding))
    return shard


def elastic_shard(data: Any, sharding: Sharding) -> Any:
    """Returns a shard that ``epochs_of_shard`` can change; ``None`` if other processes cannot read ``data``."""
    if sharding.batch_size is None and not kind_of(data).has_batches:
        return None
    epochs = epochs_of(data, sharding)
    return data_of(epochs) if epochs.doubt is None else None


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


def epochs_of(data: Any, sharding: Sharding) -> EpochData:
    """Returns the epochs of ``data``, of which any process can read any shard.

    Args:
        data: global batches, or arrays and a batch size.
        sharding: the part of this process, and the order of examples.

    Raises:
        ConfigError: as ``DataKind.split`` and ``DataKind.shard``.
    """
    return kind_of(data).epochs(data, sharding)


def epochs_of_shard(data: Any, part: Part) -> EpochData:
    """Returns the epochs of the data set of which ``choros.keras.shard`` has made ``data``.

    Args:
        data: what Keras' ``fit`` receives.
        part: that of this process.
    """
    if epochs := epochs_behind(data):
        return epochs
    if source := getattr(data, _SOURCE, None):
        return epochs_of(*source)
    doubt = (
        f"other ranks cannot read this rank's {type(data).__name__}. Pass all data to choros.keras.shard(…, "
        "batch_size=…), and what it returns, unchanged, to fit."
    )
    return FixedData(Sharding(part), lambda: data, doubt)
