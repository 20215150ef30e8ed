"""Batches of arrays in memory, and iterables of batches, which are of no package. A list of arrays may be both: for
``shard`` each array's rows are the examples, elsewhere each array is a batch.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, final

from choros.data.epochs import EpochData
from choros.data.kinds import DataKind, are_arrays
from choros.data.rows import Part, Sharding, common_rows, cut
from choros.errors import ConfigError
from choros.parallel.structure import leaves


@final
class ArrayKind(DataKind):
    """Arrays, or tuples, lists and dicts of them; and iterables of such batches."""

    shuffles: ClassVar[bool] = True

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns rows of the arrays; with a batch size a ``PyDataset``."""
        if sharding.batch_size is None:
            if sharding.shuffle:
                raise ConfigError("shuffle=True needs batch_size; without it the rows are sharded in their order.")
            return cut(data, *sharding.part.range(common_rows(data)))
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


KIND = ArrayKind()
