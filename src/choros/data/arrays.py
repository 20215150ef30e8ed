"""Arrays in memory, and iterables of batches: data sets of no particular package. A list of arrays may be both:
for ``shard`` each array's rows are the examples, elsewhere each array is a batch.
"""

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, final

import numpy as np

from choros.comm import global_process_set
from choros.data.epochs import EpochData
from choros.data.kinds import DataKind, LocalBatches
from choros.data.rows import Part, Sharding, count_rows, cut, order_of
from choros.errors import ConfigError
from choros.parallel.structure import leaves, map_structure


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
        from choros.data.py_dataset import ArrayEpochs, PartsDataset

        return PartsDataset(ArrayEpochs(data, sharding.batch_size, sharding))

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of arrays in batches; iterables of batches can be read only once."""
        if sharding.batch_size is None:
            return super().epochs(data, sharding)
        from choros.data.py_dataset import ArrayEpochs

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


def takes_no_py_dataset() -> bool:
    """Whether models of this program may be KerasHub's, which prepare data sets of TensorFlow and Grain only."""
    return "keras_hub" in sys.modules and "tensorflow" in sys.modules


def array_slices(data: Any, seed: int | None) -> Any:
    """Returns arrays' rows as a ``tf.data.Dataset``, in a new order each time by ``seed``; not in an elastic job."""
    import tensorflow as tf

    arrays = _tuples(map_structure(tf.convert_to_tensor, data))
    if seed is None:
        return tf.data.Dataset.from_tensor_slices(arrays)
    if global_process_set.communicator.elastic:
        raise ConfigError("shuffle=True for a model of KerasHub in an elastic job: shuffle the arrays before shard().")
    number, iterations = count_rows(data), itertools.count()

    def order(_: Any) -> Any:
        drawn = tf.numpy_function(lambda: np.asarray(order_of(number, seed, next(iterations)), np.int64), [], tf.int64)
        return tf.ensure_shape(drawn, [number])

    def rows(order: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(lambda array: tf.gather(array, order), arrays))

    shuffled = tf.data.Dataset.from_tensors(0).map(order).flat_map(rows)
    return shuffled.apply(tf.data.experimental.assert_cardinality(number))


def _tuples(data: Any) -> Any:
    """Lists as tuples: TensorFlow makes one array of a list."""
    if isinstance(data, (list, tuple)):
        return tuple(map(_tuples, data))
    return {name: _tuples(value) for name, value in data.items()} if isinstance(data, dict) else data


KIND = ArrayKind()
