"""Arrays as a ``tf.data.Dataset`` of examples, for models whose ``fit`` takes no ``PyDataset``."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

from choros.comm import global_process_set
from choros.errors import ConfigError
from choros.parallel.data.order import order_of
from choros.parallel.data.part import count_rows
from choros.parallel.structure import map_structure

__all__ = ["array_slices", "takes_no_py_dataset"]


def takes_no_py_dataset() -> bool:
    """Whether models of this program may be KerasHub's, which prepare data sets of TensorFlow and Grain only."""
    return "keras_hub" in sys.modules and "tensorflow" in sys.modules


def array_slices(data: Any, seed: int | None) -> Any:
    """Returns the rows of arrays as examples of a ``tf.data.Dataset``.

    Args:
        data: arrays of one length, or tuples, lists and dicts of them.
        seed: that of a new order for each iteration, the same on all ranks; ``None`` for the arrays' own.

    Raises:
        ConfigError: a new order is asked for in an elastic job, whose ranks iterate different numbers of times.
    """
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
