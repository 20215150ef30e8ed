"""Padding of ``tf.data`` that processes read independently: empty batches until all processes are at the end.

``choros/distribute/datasets/distributed.py`` documents the protocol.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.comm import Reduction, global_process_set
from choros.errors import ConfigError
from choros.parallel import ops

__all__ = ["count_rows", "padded"]


def count_rows(batch: Any) -> Any:
    """The number of rows of the tensor that has the most, as a tensor."""
    import tensorflow as tf

    return tf.reduce_max([tf.shape(leaf)[0] for leaf in tf.nest.flatten(batch)])


def padded(own: Any) -> Any:
    """Returns ``own`` with empty batches at the end, until all processes are at the end of their data.

    If all processes know their numbers of batches, they gather these numbers once; otherwise they communicate before
    each batch, in an iteration that must not be prefetched.
    """
    import tensorflow as tf

    number = int(own.cardinality())
    numbers = global_process_set.communicator.allgather(np.array([number]), name="batches of a data set").tolist()
    empty = tf.data.Dataset.from_tensors(_empty_batch(own.element_spec))
    if tf.data.UNKNOWN_CARDINALITY not in numbers:
        steps = tf.data.INFINITE_CARDINALITY if tf.data.INFINITE_CARDINALITY in numbers else max(numbers)
        if number == steps:
            return own.take(-1)
        return own.concatenate(empty.repeat(-1 if steps < 0 else steps - number))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def has_rows(*elements: Any) -> Any:
        return count_rows(elements) > 0

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def any_left(*elements: Any) -> Any:
        own_rows = tf.cast(has_rows(*elements), tf.int32)
        return ops.allreduce(own_rows, Reduction.MAX, name="batches left") > 0

    options = tf.data.Options()
    # Collectives must run in program order: no batch may be fetched before it is requested.
    options.experimental_optimization.inject_prefetch = False
    return own.filter(has_rows).concatenate(empty.repeat()).take_while(any_left).with_options(options)


def _empty_batch(element_spec: Any) -> Any:
    import tensorflow as tf

    def zeros(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec) or spec.shape.rank is None:
            raise ConfigError(
                "processes without data make their last steps with empty batches, which cannot be created for "
                f"{spec}: use tensors whose number of dimensions is known, or set the auto-shard policy to DATA."
            )
        empty = tf.zeros([0, *(1 if length is None else length for length in spec.shape[1:])], spec.dtype)
        return tf.sparse.from_dense(empty) if isinstance(spec, tf.SparseTensorSpec) else empty

    return tf.nest.map_structure(zeros, element_spec)
