"""Rows of the batches of a ``tf.data.Dataset``, and their number."""

from __future__ import annotations

from typing import Any

from choros.parallel.data.tf_padding import count_rows

__all__ = ["count_examples", "rows_of"]


def rows_of(batch: Any, first: Any, count: Any, local: int) -> Any:
    """Returns the rows of ``Part(first, count, local)``, whose numbers may be tensors."""
    import tensorflow as tf

    def of(leaf: Any) -> Any:
        share, remainder = count_rows(leaf) // count, count_rows(leaf) % count
        return _rows(leaf, *(replica * share + tf.minimum(replica, remainder) for replica in (first, first + local)))

    return tf.nest.map_structure(of, batch)


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
