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
    """``tf.data.Dataset``; under a strategy its auto-shard policy decides what a process reads."""

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """A ``Dataset`` of this process's examples, in batches if a batch size is given."""
        part = sharding.part
        if sharding.batch_size is None:
            return data.shard(part.count, part.first)
        return split_rows(data.batch(sharding.batch_size), part)

    def split(self, data: Any, part: Part) -> Any:
        """A ``Dataset`` of what its policy gives this process."""
        return _auto_shard(data, part, keep_empty=False)

    def local_batches(self, data: Any, part: Part) -> LocalBatches:
        """Those of a ``Dataset`` of what its policy gives this process."""
        own = _auto_shard(data, part, keep_empty=True)
        return LocalBatches(lambda: iter(own), lambda: self.length(own), own)

    def batch_rows(self, data: Any) -> int | None:
        """The static shape's."""
        import tensorflow as tf

        shape = tf.nest.flatten(data.element_spec)[0].shape
        rows: int | None = shape[0] if shape.rank else None
        return rows

    def padded(self, own: Any) -> Any:
        """Inside of TensorFlow's graph."""
        return padded(own)

    def sources(self, data: Any) -> Iterable[Any]:
        """By the inputs of each."""
        return chain(data)


def _auto_shard(dataset: Any, part: Part, *, keep_empty: bool) -> Any:
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
    pipeline = InputPipeline(part.first // part.local, part.count // part.local)
    policy = AutoShardPolicy.DATA if pipeline.count == 1 else policy_of(dataset, pipeline, global_batch)
    if policy is AutoShardPolicy.DATA:
        if pipeline.count > 1:
            check_order(dataset)
        options = tf.data.Options()
        options.deterministic = True
        return split_rows(dataset, part, keep_empty=keep_empty).with_options(options)
    own = own_files(dataset, policy, pipeline, global_batch)
    return padded(own) if keep_empty else own


def split_rows(batches: Any, part: Part, *, keep_empty: bool = False) -> Any:
    """The process's rows of each batch.

    Args:
        batches: a ``tf.data.Dataset``.
        part: which rows those are.
        keep_empty: whether a batch of which the process gets no row becomes one of no rows, and is not left out.
    """
    import tensorflow as tf

    def rows(*elements: Any) -> Any:
        batch = elements[0] if len(elements) == 1 else elements
        share, remainder = count_rows(batch) // part.count, count_rows(batch) % part.count
        start, end = (
            replica * share + tf.minimum(replica, remainder) for replica in (part.first, part.first + part.local)
        )
        return tf.nest.map_structure(lambda leaf: leaf[start:end], batch)

    parts = batches.map(rows, num_parallel_calls=tf.data.AUTOTUNE)
    number = int(batches.cardinality())
    if keep_empty or number == tf.data.INFINITE_CARDINALITY:
        return parts
    parts = parts.filter(lambda *elements: count_rows(elements) > 0)
    known = _count_own(batches, part)
    return parts if known is None else parts.apply(tf.data.experimental.assert_cardinality(known))


def _count_own(batches: Any, part: Part) -> int | None:
    """In how many batches the process has rows, if that is known before they are read."""
    plan = count_examples(batches)
    if plan is None:
        return None
    examples, batch_size = plan
    return len(batch_ranges(examples, batch_size, part.first, part.count))


def count_examples(batches: Any) -> tuple[int, int] | None:
    """How many examples are in ``batches``, and how many in each of them, if that is known before they are read.

    It is where what was batched has a known length, and what came after ``batch()`` kept the number of batches.
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
