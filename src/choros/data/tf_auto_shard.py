"""Auto-sharding of a ``tf.data.Dataset``: a process reads all of it, its files, or its rows of every batch. Where
processes may have different numbers of batches, they are padded with empty ones until all have ended. The module
imports TensorFlow: import it on demand.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from choros.comm import Array, Reduction, global_process_set
from choros.data.rows import check_global_batch
from choros.errors import ConfigError
from choros.parallel import ops

AutoShardPolicy = tf.data.experimental.AutoShardPolicy
#: The operations that read records from the files named by their input, as far as TensorFlow's rewrite knows them.
_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "ArrayRecordDataset", "SSTableDataset")


def policy_of(dataset: Any, processes: int, global_batch: int) -> Any:
    """Returns the policy of ``dataset``, with ``AUTO`` resolved; all processes must call this."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE):
        return policy
    communicator = global_process_set.communicator
    files = int(communicator.allreduce(_count_files(dataset), Reduction.MIN, name="files of a data set"))
    if policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.FILE if files >= processes and global_batch >= 0 else AutoShardPolicy.DATA
    if files >= processes:
        return policy
    found = f"reads {files} files" if files else "reads no files through TFRecordDataset, TextLineDataset or the like"
    raise ConfigError(
        f"AutoShardPolicy.FILE: the data set {found}, which {processes} processes cannot share. Write more "
        "files, or set options.experimental_distribute.auto_shard_policy to DATA."
    )


def own_files(dataset: Any, policy: Any, process: int, processes: int, global_batch: int) -> Any:
    """Returns the data set that this process reads under ``OFF``, ``FILE`` or ``HINT``, in batches of its share."""
    from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset, batch_sizes_for_worker

    if global_batch < 0:
        raise ConfigError(
            f"AutoShardPolicy.{policy.name}: the batch size of the data set is not known. Call batch() once, or set "
            "options.experimental_distribute.auto_shard_policy to DATA."
        )
    check_global_batch(global_batch, processes)
    own = dataset
    if policy is not AutoShardPolicy.OFF:
        for files in _file_names(dataset):
            check_order(files)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        own = _AutoShardDataset(dataset.with_options(options), processes, process)
    return own.rebatch(batch_sizes_for_worker(global_batch, processes, 1, process))


def chain(dataset: Any) -> Iterator[Any]:
    """Yields ``dataset`` and all data sets that it is derived from."""
    yield dataset
    for inner in dataset._inputs():
        yield from chain(inner)


def check_order(dataset: Any) -> None:
    """Raises a ``ConfigError`` if the order of ``dataset`` may differ between processes, which prevents sharding."""
    if (0, 0) in seeds_of(dataset):
        raise ConfigError(
            "the tf.data.Dataset is shuffled without a seed, so its order differs between processes, and their "
            "parts would repeat and miss examples. Pass shuffle(…, seed=…) or list_files(…, seed=…), or create the "
            "data set after the strategy, which sets the same seed on all processes."
        )


def seeds_of(dataset: Any) -> list[tuple[int, int]]:
    """The seeds of all that draws random numbers in ``dataset``, as far as they are known."""
    pairs: list[Any] = []
    for each in chain(dataset):
        pairs.append((getattr(each, "_seed", None), getattr(each, "_seed2", None)))
        pairs += [op.inputs[2:4] for op in _operations(each) if op.type.startswith("ShuffleDataset")]
    values = [tuple(None if seed is None else tf.get_static_value(seed) for seed in pair) for pair in pairs]
    return [(int(first), int(second)) for first, second in values if first is not None and second is not None]


def constants_of(dataset: Any) -> list[Array]:
    """The arrays in memory of which ``dataset`` is made, such as names of files."""
    slices = [each for each in chain(dataset) if type(each).__name__ == "_TensorSliceDataset"]
    tensors = [tensor for each in slices for tensor in each._tensors]
    return [np.asarray(tensor) for tensor in tensors if hasattr(tensor, "numpy") and tensor.dtype != tf.variant]


def _operations(dataset: Any) -> list[Any]:
    """The operations of the function that ``interleave``, ``flat_map`` and others call for each element."""

    def within(graph: Any) -> list[Any]:
        nested = [operation for function in graph._functions.values() for operation in within(function.graph)]
        return [*graph.get_operations(), *nested]

    function = getattr(dataset, "_map_func", None)
    return [] if function is None else within(function.function.graph)


def _file_names(dataset: Any) -> list[Any]:
    """Returns the data sets of file names that ``dataset`` reads."""
    if type(dataset).__name__.startswith(_READERS):
        return list(dataset._inputs())
    if any(operation.type.startswith(_READERS) for operation in _operations(dataset)):
        return list(dataset._inputs())
    return [names for inner in dataset._inputs() for names in _file_names(inner)]


def _count_files(dataset: Any) -> int:
    """Returns the number of files that ``dataset`` reads, at least; 0 if none."""
    counts = []
    for names in _file_names(dataset):
        number = int(names.cardinality())
        if number == tf.data.UNKNOWN_CARDINALITY:
            number = int(names.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1))
        counts.append(2**31 if number == tf.data.INFINITE_CARDINALITY else number)
    return min(counts, default=0)


def count_rows(batch: Any) -> Any:
    """The number of rows of the tensor that has the most, as a tensor."""
    return tf.reduce_max([tf.shape(leaf)[0] for leaf in tf.nest.flatten(batch)])


def padded(own: Any) -> Any:
    """Returns ``own`` with empty batches at the end, until all processes are at the end of their data. If all know
    their numbers of batches, they gather these once; otherwise they communicate before each batch, in an iteration
    that must not be prefetched.
    """
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
    def zeros(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec) or spec.shape.rank is None:
            raise ConfigError(
                "processes without data make their last steps with empty batches, which cannot be created for "
                f"{spec}: use tensors whose number of dimensions is known, or set the auto-shard policy to DATA."
            )
        empty = tf.zeros([0, *(1 if length is None else length for length in spec.shape[1:])], spec.dtype)
        return tf.sparse.from_dense(empty) if isinstance(spec, tf.SparseTensorSpec) else empty

    return tf.nest.map_structure(zeros, element_spec)
