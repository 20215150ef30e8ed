"""Batches of a ``tf.data.Dataset``. The module imports TensorFlow: import it on demand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, final

import numpy as np
import tensorflow as tf

from choros.comm import global_process_set
from choros.data.epochs import EpochData, FixedData, StreamData
from choros.data.kinds import DataKind
from choros.data.plan import OPEN, ShardBatches
from choros.data.rows import Part, Sharding, batch_counts, check_global_batch, note_rows, order_of, slice_rows
from choros.data.tf_auto_shard import (
    AutoShardPolicy,
    chain,
    check_order,
    constants_of,
    count_rows,
    own_files,
    padded,
    policy_of,
    seeds_of,
)
from choros.errors import ConfigError
from choros.parallel.objects import object_of_first
from choros.parallel.structure import map_structure


@final
class TfDataKind(DataKind):
    """``tf.data.Dataset``; under a strategy its auto-shard policy determines what a process reads."""

    own_rows: ClassVar[str] = "options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF"

    def shard(self, data: Any, sharding: Sharding) -> Any:
        """Returns a ``Dataset`` of this process's examples, in batches if a batch size is given."""
        part = sharding.part
        check_order(data)
        if sharding.batch_size is None:
            return data.shard(part.count, part.first)
        return split_rows(_batched(data, sharding.batch_size), part)

    def split(self, data: Any, part: Part) -> Any:
        """Returns a ``Dataset`` of this process's part, by the auto-shard policy."""
        return _auto_shard(data, part)

    def local_batches(self, data: Any, part: Callable[[], Part]) -> Any:
        """Returns a ``Dataset`` of this process's part, by the auto-shard policy; under ``FILE`` and others, of now."""
        return _auto_shard(data, part(), later=part)

    def epochs(self, data: Any, sharding: Sharding) -> EpochData:
        """Returns the epochs of a data set that each process can read whole."""
        policy = data.options().experimental_distribute.auto_shard_policy
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
        shape = tf.nest.flatten(data.element_spec)[0].shape
        rows: int | None = shape[0] if shape.rank else None
        return rows

    def rows(self, data: Any) -> int | None:
        """Returns the number of examples of which it makes batches, if that is known."""
        counted = count_examples(data)
        return None if counted is None else counted[0]

    def traits(self, data: Any) -> Iterable[Any]:
        """Returns the seeds of what is shuffled, and what lies in memory, such as names of files."""
        if data.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF:
            return ()
        return [*constants_of(data), np.array(seeds_of(data), np.float64).reshape(-1)]

    def padded(self, own: Any) -> Any:
        """Pads ``own`` inside TensorFlow's graph."""
        return padded(own)

    def sources(self, data: Any) -> Iterable[Any]:
        """Yields the data set and, recursively, its inputs."""
        return chain(data)


def _auto_shard(dataset: Any, part: Part, later: Callable[[], Part] | None = None) -> Any:
    """Returns this process's part by the auto-shard policy. ``later``: what it is in later iterations, of which all
    processes have as many batches.
    """
    global_batch = _check_batches(dataset, part)
    process, processes = part.first // part.local, part.count // part.local
    policy = AutoShardPolicy.DATA if processes == 1 else policy_of(dataset, processes, global_batch)
    if policy is AutoShardPolicy.DATA:
        if processes > 1:
            check_order(dataset)
        options = tf.data.Options()
        options.deterministic = True
        if later is not None and global_process_set.communicator.elastic:
            return _changing_rows(dataset, later).with_options(options)
        keep_empty = later is not None or count_examples(dataset) is None
        return split_rows(dataset, part, keep_empty=keep_empty).with_options(options)
    own = own_files(dataset, policy, process, processes, global_batch)
    return own if later is None else padded(own)


def _check_batches(dataset: Any, part: Part) -> int:
    """Returns the number of rows of a batch, negative if not known; raises a ``ConfigError`` if it is too small."""
    if any(spec.shape.rank == 0 for spec in tf.nest.flatten(dataset.element_spec) if hasattr(spec, "shape")):
        raise ConfigError(
            "the tf.data.Dataset yields single examples: call .batch(…) on it, with the batch size of all replicas "
            "together."
        )
    global_batch = _batch_size(dataset)
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


def _batch_size(dataset: Any) -> int:
    from tensorflow.python.data.experimental.ops.distribute import compute_batch_size

    return int(compute_batch_size(dataset))


def _sizes_of_parts(dataset: Any) -> set[int]:
    """Returns the batch sizes of the data sets that were zipped to ``dataset``; -1 for one that is not known."""
    while len(inputs := dataset._inputs()) == 1 and not hasattr(dataset, "_batch_size"):
        (dataset,) = inputs
    return {_batch_size(each) for each in inputs} if len(inputs) > 1 else set()


def split_rows(batches: Any, part: Part, *, keep_empty: bool = False) -> Any:
    """Returns a data set of the process's rows of each batch; ``keep_empty`` keeps batches in which it has none."""
    parts = _rows(batches, part.first, part.count, part.local)
    number = int(batches.cardinality())
    if keep_empty or number == tf.data.INFINITE_CARDINALITY:
        return parts
    known = _count_own(batches, part)
    return parts.filter(lambda *elements: count_rows(elements) > 0) if known is None else parts.take(known)


def _changing_rows(batches: Any, part: Callable[[], Part]) -> Any:
    """Returns a data set of the rows of ``part()``, which each iteration calls once, when it begins."""
    local = part().local

    def position() -> Any:
        now = part()
        return np.array([now.first, now.count])

    def rows(position: Any) -> Any:
        first, count = tf.unstack(tf.cast(position, tf.int32))
        return _rows(batches, first, count, local)

    return _made_anew(position, [2], rows, int(batches.cardinality()))


def _made_anew(ask: Callable[[], Any], shape: list[int], make: Callable[[Any], Any], number: int) -> Any:
    """Returns a data set of ``number`` elements: what ``make`` makes of what ``ask`` says, anew each iteration."""

    def asked(_: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(lambda: np.asarray(ask(), np.int64), [], tf.int64), shape)

    own = tf.data.Dataset.from_tensors(0).map(asked).flat_map(make)
    return own if number == tf.data.UNKNOWN_CARDINALITY else own.apply(tf.data.experimental.assert_cardinality(number))


def _rows(batches: Any, first: Any, count: Any, local: int) -> Any:
    def rows(*elements: Any) -> Any:
        return rows_of(elements[0] if len(elements) == 1 else elements, first, count, local)

    return batches.map(rows, num_parallel_calls=tf.data.AUTOTUNE)


def _count_own(batches: Any, part: Part) -> int | None:
    """The number of batches in which the process has rows, if known: Keras counts an update too many otherwise."""
    plans = [count_examples(each) for each in _zipped(batches)]
    known = [part.batches_of(*batch_counts(*plan)) for plan in plans if plan is not None]
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


def rows_of(batch: Any, first: Any, count: Any, local: int) -> Any:
    """Returns the rows of ``Part(first, count, local)``, whose numbers may be tensors."""

    def of(leaf: Any) -> Any:
        share, remainder = count_rows(leaf) // count, count_rows(leaf) % count
        ends = (replica * share + tf.minimum(replica, remainder) for replica in (first, first + local))
        return slice_rows(leaf, *ends)

    return tf.nest.map_structure(of, batch)


def count_examples(batches: Any) -> tuple[int, int] | None:
    """The numbers of examples in all and in each batch, if known: what follows ``batch()`` keeps that of batches."""
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


#: Whether to serialise a pipeline with a state outside of it, such as a Python function: warn, do not fail.
_WARN = 1


@final
class TfEpochs(StreamData):
    """The epochs of a ``tf.data.Dataset`` that each process reads whole; what it shuffles must have a seed."""

    def __init__(self, dataset: Any, sharding: Sharding) -> None:
        check_order(dataset)
        self._order = _order_of(dataset, sharding.batch_size)
        super().__init__(sharding, TfEpochs._own, lambda epoch: self._order.iterator(self._iteration(epoch)))
        self._batches = self._order.batches
        with tf.device("CPU:0"):
            #: The current part: the first batch and the end, the first replica and the number of replicas.
            self._now = tf.Variable([0] * 4, dtype=tf.int64, trainable=False)
        self._set()

    def begin_fit(self) -> None:
        """Goes on with the orders after those of earlier calls of ``fit``, as ``shuffle`` does."""
        self.seed = object_of_first(lambda: self._order.begun)

    def begin_epoch(self, epoch: int, parts: Iterable[ShardBatches]) -> None:
        """Sets what the next iteration yields: at most one part."""
        super().begin_epoch(epoch, parts)
        self._set()
        self._order.rewind(self._iteration(epoch))

    def _iteration(self, epoch: int) -> int:
        """The number of the iteration, of those of all calls of ``fit``, whose order an epoch has."""
        return (self.seed or 0) + epoch - self.first

    def _set(self) -> None:
        (each,) = self.parts or (ShardBatches(0, 1, range(0)),)
        part = each.part(self._local)
        self._now.assign([each.batches.start, each.batches.stop, part.first, part.count])

    def _own(self) -> Any:
        """Returns a ``tf.data.Dataset``, whose iterations read what ``begin_epoch`` has set."""
        batches, now, local = self._batches, self._now, self._local

        def rows(_: Any, batch: Any) -> Any:
            return rows_of(batch, tf.cast(now[2], tf.int32), tf.cast(now[3], tf.int32), local)

        own = batches.enumerate().take_while(lambda index, _: index < now[1])
        own = own.filter(lambda index, _: index >= now[0])
        own = own.map(rows, num_parallel_calls=tf.data.AUTOTUNE)
        if count_examples(batches) is not None:  # else batches without rows may come before others
            own = own.filter(lambda *each: count_rows(each) > 0)
        own = own.prefetch(tf.data.AUTOTUNE)
        number = int(batches.cardinality())
        if number >= 0:
            # Keras asks once. An epoch may have fewer batches, which ``assert_cardinality`` would not permit.
            own.cardinality = lambda: tf.constant(number, tf.int64)
        return own

    def _rows(self, part: Part, batch: Any) -> Any:
        return rows_of(batch, part.first, part.count, part.local)

    @property
    def number_of_batches(self) -> int | None:
        """As TensorFlow knows it."""
        number = int(self._batches.cardinality())
        return OPEN if number == tf.data.INFINITE_CARDINALITY else None if number < 0 else number

    def _count(self, epoch: int) -> tuple[int, int, int]:
        if self.number_of_batches == OPEN:
            return OPEN, OPEN, OPEN
        known = count_examples(self._batches)
        if known is None:
            return super()._count(epoch)
        return batch_counts(*known)


def _order_of(dataset: Any, batch_size: int | None) -> _SeedOrder:
    """Returns the order of ``dataset``, the same object in each call: other iterations would change it."""
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

    The seeds of iteration e + 1 are those of epoch e, counted over all calls of ``fit``, which have ``begun`` so many.
    The generators are set back with the state of an iterator::

        iteration     0        1          2          3
        seeds         drawn    epoch 0    epoch 1    epoch 2
                      │ saved  ▲
                      └────────┘ restored: the next iteration is that of epoch 0 again
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self._shuffles = any(getattr(each, "_reshuffle_each_iteration", False) for each in chain(batches))
        self._saved = [self._save(iter(batches))] if self._shuffles else []
        self.begun = 0

    def rewind(self, epoch: int) -> None:
        """Makes the next iteration that of ``epoch``."""
        self.begun = max(self.begun, epoch + 1)
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
        return tf.raw_ops.SerializeIterator(resource_handle=iterator._iterator_resource, external_state_policy=_WARN)

    def _restore(self, iteration: int) -> None:
        resource = iter(self.batches)._iterator_resource
        tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=self._saved[iteration])


def array_slices(data: Any, seed: int | None) -> Any:
    """Returns arrays' rows as a ``tf.data.Dataset``, in a new order each time by ``seed``; not in an elastic job."""
    import keras

    # TensorFlow makes one array of a list.
    arrays = keras.tree.lists_to_tuples(map_structure(tf.convert_to_tensor, data))
    if seed is None:
        return tf.data.Dataset.from_tensor_slices(arrays)
    if global_process_set.communicator.elastic:
        raise ConfigError("shuffle=True for a model of KerasHub in an elastic job: shuffle the arrays before shard().")
    number, iterations = int(count_rows(arrays)), itertools.count()

    def rows(order: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(lambda array: tf.gather(array, order), arrays))

    return _made_anew(lambda: order_of(number, seed, next(iterations)), [number], rows, number)


KIND = TfDataKind()
