"""Arrays in memory, and iterables of batches: data sets of no particular package.

A list of arrays may be both: for ``shard`` each array's rows are the examples, for the other methods each array is a
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, final

import numpy as np

from choros.errors import ConfigError
from choros.parallel.data.epochs import EpochData
from choros.parallel.data.kind import DataKind, LocalBatches
from choros.parallel.data.part import Part, cut
from choros.parallel.data.sharding import Sharding
from choros.parallel.structure import leaves

__all__ = ["ArrayKind"]


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
        from choros.parallel.data.array_batches import ArrayBatches

        return ArrayBatches(data, sharding.batch_size, sharding)

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of arrays in batches; iterables of batches can be read only once."""
        if sharding.batch_size is None:
            return super().epochs(data, sharding)
        from choros.parallel.data.array_batches import ArrayEpochs

        return ArrayEpochs(data, sharding.batch_size, sharding)

    def local_batches(self, data: Any, part: Callable[[], Part]) -> LocalBatches:
        """Returns the process's rows of each batch of an iterable."""
        if (
            not isinstance(data, Iterable)
            or isinstance(data, (tuple, dict, str, bytes))
            or hasattr(data, "shape")  # an array
        ):
            raise ConfigError(
                f"a {type(data).__name__} is no data set of batches. Strategies take tf.data.Dataset, PyDataset, torch "
                "DataLoader, Grain data sets and iterables of batches; split arrays into batches first."
            )
        return super().local_batches(data, part)
