"""Arrays in memory, and iterables of batches: data of no package's making.

A list of arrays is either: ``shard`` takes the rows of each array for examples, the other methods take each array for
a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, final

import numpy as np

from choros.errors import ConfigError
from choros.parallel.data.kind import DataKind, LocalBatches, Sharding
from choros.parallel.data.part import Part, cut
from choros.parallel.structure import leaves

__all__ = ["ArrayKind"]


@final
class ArrayKind(DataKind):
    """Arrays, or tuples, lists and dicts of them; and whatever yields such batches."""

    shuffles: ClassVar[bool] = True

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Rows of the arrays; with a batch size a ``PyDataset``."""
        lengths = {np.shape(leaf)[:1] for leaf in leaves(data)}
        if len(lengths) != 1 or lengths == {()}:
            raise ConfigError(
                f"shard() got a {type(data).__name__} whose parts have the lengths {sorted(lengths)}. It takes arrays "
                "of one length, tf.data, PyDataset, DataLoader and Grain data sets."
            )
        if sharding.batch_size is None:
            if sharding.shuffle:
                raise ConfigError("shuffle=True needs batch_size; without it the rows are split in their order.")
            ((n,),) = lengths
            return cut(data, *sharding.part.range(n))
        from choros.parallel.data.array_batches import ArrayBatches

        return ArrayBatches(data, sharding.batch_size, sharding)

    def local_batches(self, data: Any, part: Part) -> LocalBatches:
        """Rows of each batch of an iterable."""
        if (
            not isinstance(data, Iterable)
            or isinstance(data, (tuple, dict, str, bytes))
            or hasattr(data, "shape")  # an array
        ):
            raise ConfigError(
                f"a {type(data).__name__} is no data set of batches. Strategies take tf.data.Dataset, PyDataset, torch "
                "DataLoader, Grain data sets and iterables of batches; of arrays, make batches first."
            )
        return super().local_batches(data, part)
