"""Batches of a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, final

import numpy as np

from choros.comm import global_process_set
from choros.errors import ConfigError
from choros.parallel.data.epochs import EpochData, FixedData
from choros.parallel.data.kind import DataKind, LocalBatches
from choros.parallel.data.part import Part, check_global_batch, note_rows
from choros.parallel.data.shard import batch_ranges
from choros.parallel.data.sharding import Sharding
from choros.parallel.data.tf_auto_shard import AutoShardPolicy, InputPipeline, chain, check_order, own_files, policy_of
from choros.parallel.data.tf_epochs import TfEpochs
from choros.parallel.data.tf_padding import count_rows, padded
from choros.parallel.data.tf_rows import count_examples, rows_of

__all__ = ["KIND", "TfDataKind"]


@final
class TfDataKind(DataKind):
    """``tf.data.Dataset``; under a strategy its auto-shard policy determines what a process reads."""

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a ``Dataset`` of this process's examples, in batches if a batch size is given."""
        part = sharding.part
        if sharding.batch_size is None:
            return data.shard(part.count, part.first)
        return split_rows(_batched(data, sharding.batch_size), part)

    def split(self, data: Any, part: Part) -> Any:
        """Returns a ``Dataset`` of this process's part, by the auto-shard policy."""
        return _auto_shard(data, part, keep_empty=False)

    def local_batches(self, data: Any, part: Callable[[], Part]) -> LocalBatches:
        """Returns the batches of this process's part, by the auto-shard policy; under ``FILE`` and others, of now."""
        own = _auto_shard(data, part(), keep_empty=True, later=part)
        return LocalBatches(lambda: iter(own), lambda: self.length(own), own)

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of a data set that each process can read whole."""
        policy = AutoShardPolicy(int(data.options().experimental_distribute.auto_shard_policy))
        if sharding.batch_size is None and policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
            doubt = (
                f"with AutoShardPolicy.{policy.name} a process reads only its part of the tf.data.Dataset. Set "
                "options.experimental_distribute.auto_shard_policy to DATA."
            )
            return FixedData(sharding, lambda: self.split(data, sharding.part), doubt)
        batches = data if sharding.batch_size is None else _batched(data, sharding.batch_size)
        _check_batches(batches, sharding.part)
        return TfEpochs(data, replace(sharding, batch_size=None) if batches is data else sharding)

    def batch_rows(self, data: Any) -> int | None:
        """Returns the number of rows in the static shape."""
        import tensorflow as tf

        shape = tf.nest.flatten(data.element_spec)[0].shape
        rows: int | None = shape[0] if shape.rank else None
        return rows

    def padded(self, own: Any) -> Any:
        """Pads ``own`` inside TensorFlow's graph."""
        return padded(own)

    def sources(self, data: Any) -> Iterable[Any]:
        """Yields the data set and, recursively, its inputs."""
        return chain(data)


def _auto_shard(dataset: Any, part: Part, *, keep_empty: bool, later: Callable[[], Part] | None = None) -> Any:
    """Returns this process's part of ``dataset``, by its auto-shard policy.

    Args:
        dataset: a data set of global batches.
        part: the process's part of each.
        keep_empty: whether all processes must have the same number of batches. Otherwise a process leaves out the last
            ones if it has no rows of them, where that is known before they are read.
        later: returns the process's part of later iterations, if ranks may be lost.

    Raises:
        ConfigError: ``dataset`` has no batches or too small ones, or its order may differ between processes.
    """
    import tensorflow as tf

    global_batch = _check_batches(dataset, part)
    pipeline = InputPipeline(part.first // part.local, part.count // part.local)
    policy = AutoShardPolicy.DATA if pipeline.count == 1 else policy_of(dataset, pipeline, global_batch)
    if policy is AutoShardPolicy.DATA:
        if pipeline.count > 1:
            check_order(dataset)
        options = tf.data.Options()
        options.deterministic = True
        if later is not None and global_process_set.communicator.elastic:
            return _changing_rows(dataset, later).with_options(options)
        keep_empty = keep_empty or count_examples(dataset) is None
        return split_rows(dataset, part, keep_empty=keep_empty).with_options(options)
    own = own_files(dataset, policy, pipeline, global_batch)
    return padded(own) if keep_empty else own


def _check_batches(dataset: Any, part: Part) -> int:
    """Returns the number of rows of a batch, negative if not known; raises a ``ConfigError`` if it is too small."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.distribute import compute_batch_size

    if any(spec.shape.rank == 0 for spec in tf.nest.flatten(dataset.element_spec) if hasattr(spec, "shape")):
        raise ConfigError(
            "the tf.data.Dataset yields single examples: call .batch(…) on it, with the batch size of all replicas "
            "together."
        )
    global_batch = int(compute_batch_size(dataset))
    if global_batch >= 0:
        check_global_batch(global_batch, part.count)
    sizes = _sizes_of_parts(dataset)
    note_rows(None, may_differ=len(sizes) > 1 or sizes == {-1})
    return global_batch


def _batched(dataset: Any, batch_size: int) -> Any:
    """Returns the batches of ``batch_size`` examples; ``dataset`` if a part of its batches has that size already."""
    sizes = _sizes_of_parts(dataset)
    if len(sizes) == 1 or batch_size not in sizes:
        return dataset.batch(batch_size)
    note_rows(None, may_differ=True)
    return dataset


def _sizes_of_parts(dataset: Any) -> set[int]:
    """Returns the batch sizes of the data sets that were zipped to ``dataset``; -1 for one that is not known."""
    from tensorflow.python.data.experimental.ops.distribute import compute_batch_size

    while len(inputs := dataset._inputs()) == 1 and not hasattr(dataset, "_batch_size"):
        (dataset,) = inputs
    return {int(compute_batch_size(each)) for each in inputs} if len(inputs) > 1 else set()


def split_rows(batches: Any, part: Part, *, keep_empty: bool = False) -> Any:
    """Returns a data set of the process's rows of each batch.

    Args:
        batches: a ``tf.data.Dataset``.
        part: the process's part of each batch.
        keep_empty: whether a batch in which the process has no rows becomes an empty batch; otherwise it is skipped.
    """
    import tensorflow as tf

    parts = _rows(batches, part.first, part.count, part.local)
    number = int(batches.cardinality())
    if keep_empty or number == tf.data.INFINITE_CARDINALITY:
        return parts
    parts = parts.filter(lambda *elements: count_rows(elements) > 0)
    known = _count_own(batches, part)
    return parts if known is None else parts.apply(tf.data.experimental.assert_cardinality(known))


def _changing_rows(batches: Any, part: Callable[[], Part]) -> Any:
    """Returns a data set of the rows of ``part()``, which each iteration calls once, when it begins."""
    import tensorflow as tf

    local = part().local

    def position() -> Any:
        now = part()
        return np.array([now.first, now.count], np.int32)

    def asked(_: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(position, [], tf.int32), [2])

    def rows(position: Any) -> Any:
        return _rows(batches, position[0], position[1], local)

    own = tf.data.Dataset.from_tensors(0).map(asked).flat_map(rows)
    number = int(batches.cardinality())
    return own if number == tf.data.UNKNOWN_CARDINALITY else own.apply(tf.data.experimental.assert_cardinality(number))


def _rows(batches: Any, first: Any, count: Any, local: int) -> Any:
    import tensorflow as tf

    def rows(*elements: Any) -> Any:
        return rows_of(elements[0] if len(elements) == 1 else elements, first, count, local)

    return batches.map(rows, num_parallel_calls=tf.data.AUTOTUNE)


def _count_own(batches: Any, part: Part) -> int | None:
    """The number of batches in which the process has rows; ``None`` if it is not known before they are read.

    Keras counts an update too many at the end of a data set whose number of batches it does not know.
    """
    plans = [count_examples(each) for each in _zipped(batches)]
    known = [len(batch_ranges(*plan, part.first, part.count)) for plan in plans if plan is not None]
    return min(int(batches.cardinality()), max(known)) if len(known) == len(plans) > 0 else None


def _zipped(batches: Any) -> list[Any]:
    """Returns the data sets that were zipped to ``batches``, which may be mapped after that; else ``batches`` alone."""
    dataset, number = batches, int(batches.cardinality())
    while len(inputs := dataset._inputs()) == 1 and not hasattr(dataset, "_batch_size"):
        (dataset,) = inputs
        if int(dataset.cardinality()) != number:
            return [batches]
    lengths = [int(each.cardinality()) for each in inputs]
    return list(inputs) if len(inputs) > 1 and min(lengths) == number else [batches]


KIND = TfDataKind()
