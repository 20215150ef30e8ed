"""Batches of ``tf.data``."""

from __future__ import annotations

from typing import Any

from choros.parallel.data.part import Part
from choros.parallel.data.shard import batch_ranges

__all__ = ["count_examples", "count_rows", "split"]


def count_rows(batch: Any) -> Any:
    """The number of rows, as a tensor."""
    import tensorflow as tf

    return tf.shape(tf.nest.flatten(batch)[0])[0]


def split(batches: Any, part: Part, *, keep_empty: bool = False) -> Any:
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
    """In how many batches the process has rows, if that can be told beforehand."""
    plan = count_examples(batches)
    if plan is None:
        return None
    examples, batch_size = plan
    return len(batch_ranges(examples, batch_size, part.first, part.count))


def count_examples(batches: Any) -> tuple[int, int] | None:
    """How many examples are in ``batches``, and how many in each of them, if that can be told beforehand.

    It can where what was batched knows its length, and what came after ``batch()`` kept the number of batches.
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
