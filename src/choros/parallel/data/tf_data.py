"""Batches of a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from choros.errors import ConfigError
from choros.parallel.data.kind import DataKind, LocalBatches, Sharding
from choros.parallel.data.part import Part, check_global_batch
from choros.parallel.data.shard import batch_ranges
from choros.parallel.data.tf_auto_shard import AutoShardPolicy, InputPipeline, chain, check_order, own_files, policy_of
from choros.parallel.data.tf_padding import count_rows, padded

__all__ = ["KIND", "TfDataKind", "count_examples", "split_rows"]


@final
class TfDataKind(DataKind):
    """``tf.data.Dataset``; under a strategy its auto-shard policy determines what a process reads."""

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a ``Dataset`` of this process's examples, in batches if a batch size is given."""
        part = sharding.part
        if sharding.batch_size is None:
            return data.shard(part.count, part.first)
        return split_rows(data.batch(sharding.batch_size), part)

    def split(self, data: Any, part: Part) -> Any:
        """Returns a ``Dataset`` of this process's part, by the auto-shard policy."""
        return _auto_shard(data, part, keep_empty=False)

    def local_batches(self, data: Any, part: Part) -> LocalBatches:
        """Returns the batches of this process's part, by the auto-shard policy."""
        own = _auto_shard(data, part, keep_empty=True)
        return LocalBatches(lambda: iter(own), lambda: self.length(own), own)

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


def _auto_shard(dataset: Any, part: Part, *, keep_empty: bool) -> Any:
    """Returns this process's part of ``dataset``, by its auto-shard policy.

    Args:
        dataset: a data set of global batches.
        part: the process's part of each.
        keep_empty: whether all processes must have the same number of batches. Otherwise a process leaves out the last
            ones if it has no rows of them, where that is known before they are read.

    Raises:
        ConfigError: ``dataset`` has no batches or too small ones, or its order may differ between processes.
    """
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
    pipeline = InputPipeline(part.first // part.local, part.count // part.local)
    policy = AutoShardPolicy.DATA if pipeline.count == 1 else policy_of(dataset, pipeline, global_batch)
    if policy is AutoShardPolicy.DATA:
        if pipeline.count > 1:
            check_order(dataset)
        options = tf.data.Options()
        options.deterministic = True
        keep_empty = keep_empty or count_examples(dataset) is None
        return split_rows(dataset, part, keep_empty=keep_empty).with_options(options)
    own = own_files(dataset, policy, pipeline, global_batch)
    return padded(own) if keep_empty else own


def split_rows(batches: Any, part: Part, *, keep_empty: bool = False) -> Any:
    """Returns a data set of the process's rows of each batch.

    Args:
        batches: a ``tf.data.Dataset``.
        part: the process's part of each batch.
        keep_empty: whether a batch in which the process has no rows becomes an empty batch; otherwise it is skipped.
    """
    import tensorflow as tf

    def rows(*elements: Any) -> Any:
        batch = elements[0] if len(elements) == 1 else elements
        share, remainder = count_rows(batch) // part.count, count_rows(batch) % part.count
        start, end = (
            replica * share + tf.minimum(replica, remainder) for replica in (part.first, part.first + part.local)
        )
        return tf.nest.map_structure(lambda leaf: _rows(leaf, start, end), batch)

    parts = batches.map(rows, num_parallel_calls=tf.data.AUTOTUNE)
    number = int(batches.cardinality())
    if keep_empty or number == tf.data.INFINITE_CARDINALITY:
        return parts
    parts = parts.filter(lambda *elements: count_rows(elements) > 0)
    known = _count_own(batches, part)
    return parts if known is None else parts.apply(tf.data.experimental.assert_cardinality(known))


def _rows(leaf: Any, start: Any, end: Any) -> Any:
    """Returns rows ``start … end - 1`` of a tensor, a ragged tensor or a sparse one."""
    import tensorflow as tf

    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:end]
    rest = leaf.dense_shape[1:]
    first, number = (tf.cast(each, tf.int64)[None] for each in (start, end - start))
    rows = tf.sparse.slice(leaf, tf.concat([first, tf.zeros_like(rest)], 0), tf.concat([number, rest], 0))
    rows.set_shape([None, *leaf.shape[1:]])
    return rows


def _count_own(batches: Any, part: Part) -> int | None:
    """The number of batches in which the process has rows; ``None`` if it is not known before they are read."""
    plan = count_examples(batches)
    if plan is None:
        return None
    examples, batch_size = plan
    return len(batch_ranges(examples, batch_size, part.first, part.count))


def count_examples(batches: Any) -> tuple[int, int] | None:
    """The numbers of examples in ``batches`` and in each batch; ``None`` if not known before they are read.

    They are known if the data set had a known length before ``batch()``, and the transformations after ``batch()``
    keep the number of batches.
    """
    import tensorflow as tf

    number = int(batches.cardinality())
    dataset = batches
    while number >= 0 and len(dataset._inputs()) == 1:
        (inner,) = dataset._inputs()
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            size, examples = int(tf.get_static_value(size)), int(inner.cardinality())
            if examples < 0 or number not in (examples // size, -(-examples // size)):
                return None
            return min(examples, number * size), size
        if int(inner.cardinality()) != number:
            return None
        dataset = inner
    return None


KIND = TfDataKind()
