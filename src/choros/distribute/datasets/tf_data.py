"""``tf.data``: the part of a process, and how processes stay in step (drawn in ``distributed.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from choros.comm import ReduceOp, global_process_set
from choros.distribute.datasets.auto_shard import AutoShardPolicy, Shard, chain, check_order, own_files, policy_of
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.data import Part, check_global_batch, tf_data

__all__ = ["for_fit_of", "in_step", "is_marked", "marked", "split"]

_MARK = "_choros_for_fit"


def marked(dataset: Any, for_fit: Callable[[], Any]) -> Any:
    """``dataset``, which from now on is known to be dealt out, with what ``fit`` is to train on."""
    setattr(dataset, _MARK, for_fit)
    return dataset


def is_marked(dataset: Any) -> bool:
    """Whether ``dataset`` was dealt out, or made from one that was."""
    return any(hasattr(each, _MARK) for each in chain(dataset))


def for_fit_of(dataset: Any) -> Any:
    """What ``fit`` is to train on.

    Raises:
        ConfigError: ``dataset`` was made from one that was dealt out.
    """
    if not hasattr(dataset, _MARK):
        raise ConfigError(
            "the tf.data.Dataset was transformed after the strategy had dealt it out to the replicas: do so before."
        )
    return getattr(dataset, _MARK)()


def split(dataset: Any, part: Part, *, keep_empty: bool) -> Any:
    """This process's part of ``dataset``, by its auto-shard policy.

    Args:
        dataset: of global batches.
        part: the process's.
        keep_empty: whether all processes must have the same number of batches.

    Raises:
        ConfigError: ``dataset`` has no batches or too small ones, or no order that all processes share.
    """
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.distribute import compute_batch_size

    if any(spec.shape.rank == 0 for spec in tf.nest.flatten(dataset.element_spec) if hasattr(spec, "shape")):
        raise ConfigError(
            "the tf.data.Dataset yields single examples: call .batch(…) on it, with the number of examples of all "
            "replicas together."
        )
    global_batch = int(compute_batch_size(dataset))
    if global_batch >= 0:
        check_global_batch(global_batch, part.count)
    shard = Shard(part.first // part.local, part.count // part.local)
    policy = AutoShardPolicy.DATA if shard.count == 1 else policy_of(dataset, shard, global_batch)
    if policy is AutoShardPolicy.DATA:
        if shard.count > 1:
            check_order(dataset)
        options = tf.data.Options()
        options.deterministic = True
        return tf_data.split(dataset, part, keep_empty=keep_empty).with_options(options)
    own = own_files(dataset, policy, shard, global_batch)
    return in_step(own) if keep_empty else own


def in_step(own: Any) -> Any:
    """``own``, with batches of no rows at the end until all processes have come to theirs.

    Where all know how long theirs are, they tell each other now; otherwise they ask before each batch, in an iteration
    that nothing may run ahead of.
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
        return tf_data.count_rows(elements) > 0

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
    def any_left(*elements: Any) -> Any:
        mine = tf.cast(has_rows(*elements), tf.int32)
        return ops.allreduce(mine, ReduceOp.MAX, name="batches left") > 0

    options = tf.data.Options()
    # Collectives happen in the order of the program: nobody fetches a batch before it is asked for.
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
