"""The kinds of data sets, found without importing the packages that define them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

from choros.parallel.data.arrays import ArrayKind
from choros.parallel.data.kind import DataKind
from choros.parallel.structure import leaves

__all__ = ["are_arrays", "kind_of"]


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
