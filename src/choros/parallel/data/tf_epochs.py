"""Epochs of a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, final

from choros.parallel.data.epochs import StreamData
from choros.parallel.data.part import Part
from choros.parallel.data.shard_batches import OPEN, ShardBatches
from choros.parallel.data.sharding import Sharding
from choros.parallel.data.tf_auto_shard import chain, check_order
from choros.parallel.data.tf_padding import count_rows
from choros.parallel.data.tf_rows import count_examples, rows_of

__all__ = ["TfEpochs"]

#: Whether to serialise a pipeline with a state outside of it, such as a Python function: warn, do not fail.
_WARN = 1


@final
class TfEpochs(StreamData):
    """The epochs of a ``tf.data.Dataset`` of global batches, which each process reads whole.

    Args:
        dataset: the data set, of batches, or of examples if ``sharding`` has a batch size; what it shuffles must have a
            seed.
        sharding: the shard of this process in the first epoch.
    """

    def __init__(self, dataset: Any, sharding: Sharding) -> None:
        import tensorflow as tf

        super().__init__(sharding)
        check_order(dataset)
        self._order = _order_of(dataset, sharding.batch_size)
        self._batches = self._order.batches
        with tf.device("CPU:0"):
            #: The current part: the first batch and the end, the first replica and the number of replicas.
            self._now = tf.Variable([0] * 4, dtype=tf.int64, trainable=False)
        self._set()

    def begin_epoch(self, epoch: int, parts: Iterable[ShardBatches]) -> None:
        """Sets what the next iteration yields: at most one part."""
        super().begin_epoch(epoch, parts)
        self._set()
        self._order.rewind(epoch)

    def _set(self) -> None:
        (each,) = self.parts or (ShardBatches(0, 1, range(0)),)
        part = each.part(self._local)
        self._now.assign([each.batches.start, each.batches.stop, part.first, part.count])

    @cached_property
    def data(self) -> Any:
        """A ``tf.data.Dataset``, whose iterations read what ``begin_epoch`` has set."""
        import tensorflow as tf

        batches, now, local = self._batches, self._now, self._local

        def begun(index: Any, *_: Any) -> Any:
            return index >= now[0]

        def continues(index: Any, *_: Any) -> Any:
            return index < now[1]

        def rows(_: Any, batch: Any) -> Any:
            return rows_of(batch, tf.cast(now[2], tf.int32), tf.cast(now[3], tf.int32), local)

        own = batches.enumerate().take_while(continues).filter(begun).map(rows, num_parallel_calls=tf.data.AUTOTUNE)
        if count_examples(batches) is not None:  # else batches without rows may come before others
            own = own.filter(lambda *each: count_rows(each) > 0)
        own = own.prefetch(tf.data.AUTOTUNE)
        number = int(batches.cardinality())
        if number >= 0:
            # Keras asks once. An epoch may have fewer batches, which ``assert_cardinality`` would not permit.
            own.cardinality = lambda: tf.constant(number, tf.int64)
        return own

    def _global_batches(self, epoch: int) -> Iterator[Any]:
        return iter(self._order.iterator(epoch))

    def _rows(self, part: Part, batch: Any) -> Any:
        return rows_of(batch, part.first, part.count, part.local)

    @property
    def number_of_batches(self) -> int | None:
        """As TensorFlow knows it."""
        import tensorflow as tf

        number = int(self._batches.cardinality())
        return OPEN if number == tf.data.INFINITE_CARDINALITY else None if number < 0 else number

    def _count(self, epoch: int) -> tuple[int, int, int]:
        if self.number_of_batches == OPEN:
            return OPEN, OPEN, OPEN
        known = count_examples(self._batches)
        if known is None:
            return super()._count(epoch)
        examples, size = known
        return -(-examples // size), min(examples, size), (examples - 1) % size + 1


def _order_of(dataset: Any, batch_size: int | None) -> _SeedOrder:
    """Returns the order of ``dataset``, the same object in each call: other iterations would change it."""
    import tensorflow as tf

    known: dict[int | None, _SeedOrder] = dataset.__dict__.setdefault("_choros_order", {})
    if batch_size not in known:
        options = tf.data.Options()
        options.deterministic = True
        batches = dataset if batch_size is None else dataset.batch(batch_size)
        known[batch_size] = _SeedOrder(batches.with_options(options))
    return known[batch_size]


@final
class _SeedOrder:
    """The random order of the iterations of a data set, each of which draws new seeds from its generators.

    The seeds of iteration e + 1 are those of epoch e. The generators are set back with the state of an iterator::

        iteration     0        1          2          3
        seeds         drawn    epoch 0    epoch 1    epoch 2
                      │ saved  ▲
                      └────────┘ restored: the next iteration is that of epoch 0 again
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self._shuffles = any(getattr(each, "_reshuffle_each_iteration", False) for each in chain(batches))
        self._saved = [self._save(iter(batches))] if self._shuffles else []

    def rewind(self, epoch: int) -> None:
        """Makes the next iteration that of ``epoch``."""
        if not self._shuffles:
            return
        while len(self._saved) <= epoch:
            self._restore(len(self._saved) - 1)
            self._saved.append(self._save(iter(self.batches)))
        self._restore(epoch)

    def iterator(self, epoch: int) -> Any:
        """Returns an iterator of ``epoch``."""
        self.rewind(epoch)
        return iter(self.batches)

    def _save(self, iterator: Any) -> Any:
        import tensorflow as tf

        return tf.raw_ops.SerializeIterator(resource_handle=iterator._iterator_resource, external_state_policy=_WARN)

    def _restore(self, iteration: int) -> None:
        import tensorflow as tf

        resource = iter(self.batches)._iterator_resource
        tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=self._saved[iteration])
