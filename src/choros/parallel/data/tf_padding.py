"""``tf.data`` that processes read by themselves, with batches of no rows until all have come to their ends.

The protocol is drawn in ``choros/distribute/datasets/distributed.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from choros.comm import Reduction, global_process_set
from choros.errors import ConfigError
from choros.parallel import ops

__all__ = ["count_rows", "padded"]


def count_rows(batch: Any) -> Any:
    """The number of rows, as a tensor."""
    import tensorflow as tf

    return tf.shape(tf.nest.flatten(batch)[0])[0]


def padded(own: Any) -> Any:
    """``own``, with batches of no rows at the end until all processes have come to theirs.

    Where all know how many batches they have, they exchange the numbers now; otherwise they ask before each batch, in
    an iteration that must not be prefetched.
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
        mine = tf.cast(has_rows(*elements), tf.int32)
        return ops.allreduce(mine, Reduction.MAX, name="batches left") > 0

    options = tf.data.Options()
    # Collectives happen in the order of the program: no batch is fetched before it is asked for.
    options.experimental_optimization.inject_prefetch = False
    return own.filter(has_rows).concatenate(empty.repeat()).take_while(any_left).with_options(options)


def _empty_batch(element_spec: Any) -> Any:
    import tensorflow as tf

    def zeros(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise ConfigError(
                "processes that run out of data make their last steps with batches of no rows, which cannot be made "
                f"for {spec}: give tensors whose number of dimensions is known, or set the auto-shard policy to DATA."
            )
        return tf.zeros([0, *(1 if extent is None else extent for extent in spec.shape[1:])], spec.dtype)

    return tf.nest.map_structure(zeros, element_spec)
