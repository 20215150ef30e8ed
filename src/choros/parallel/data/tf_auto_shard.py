"""Auto-sharding of a ``tf.data.Dataset``: a process reads all of it, its files, or its rows of every batch."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from choros.comm import Reduction, global_process_set
from choros.errors import ConfigError
from choros.parallel.data.part import check_global_batch
from choros.topology import shard_range

__all__ = ["AutoShardPolicy", "InputPipeline", "chain", "check_order", "own_files", "policy_of"]

#: The operations that read records from the files named by their input, as far as TensorFlow's rewrite knows them.
_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "ArrayRecordDataset", "SSTableDataset")


class AutoShardPolicy(enum.IntEnum):
    """``tf.data.experimental.AutoShardPolicy``: how processes share a ``tf.data.Dataset``.

    Set it on the data set: ``options.experimental_distribute.auto_shard_policy``.

    Attributes:
        OFF: every process reads all of its own data set, in batches of its share of the global batch.
        AUTO: ``FILE`` if the data set reads at least as many files as there are processes, else ``DATA``.
        FILE: every process reads its share of the files.
        DATA: every process reads everything and keeps its rows of each batch.
        HINT: the data set marks where to shard, with ``shard(SHARD_HINT, SHARD_HINT)``.

    Example:
        >>> AutoShardPolicy(2)
        <AutoShardPolicy.DATA: 2>
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclass(frozen=True)
class InputPipeline:
    """A process among those that read a data set.

    Attributes:
        index: its position among them.
        count: their number.
    """

    index: int
    count: int

    def batch_sizes(self, global_batch: int) -> list[int]:
        """Returns the batch sizes, repeated cyclically, of a process that reads its own data.

        In each step the batches of all processes together are one global batch.

        Example:
            >>> InputPipeline(0, 2).batch_sizes(7), InputPipeline(1, 2).batch_sizes(7)
            ([4, 3], [3, 4])
        """
        ranges = [shard_range(global_batch, (self.index + step) % self.count, self.count) for step in range(self.count)]
        return [end - start for start, end in ranges]


def policy_of(dataset: Any, pipeline: InputPipeline, global_batch: int) -> AutoShardPolicy:
    """Returns the policy of ``dataset``, with ``AUTO`` resolved. All processes must call this.

    Args:
        dataset: the data set.
        pipeline: this process.
        global_batch: the number of examples in a batch; negative if not known.

    Raises:
        ConfigError: the policy is ``FILE``, and there are fewer files than processes.
    """
    policy = AutoShardPolicy(int(dataset.options().experimental_distribute.auto_shard_policy))
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE):
        return policy
    files = int(
        global_process_set.communicator.allreduce(_count_files(dataset), Reduction.MIN, name="files of a data set")
    )
    if policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.FILE if files >= pipeline.count and global_batch >= 0 else AutoShardPolicy.DATA
    if files >= pipeline.count:
        return policy
    found = f"reads {files} files" if files else "reads no files through TFRecordDataset, TextLineDataset or the like"
    raise ConfigError(
        f"AutoShardPolicy.FILE: the data set {found}, which {pipeline.count} processes cannot share. Write more "
        "files, or set options.experimental_distribute.auto_shard_policy to DATA."
    )


def own_files(dataset: Any, policy: AutoShardPolicy, pipeline: InputPipeline, global_batch: int) -> Any:
    """Returns the data set that this process reads under ``OFF``, ``FILE`` or ``HINT``, in batches of its share."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

    if global_batch < 0:
        raise ConfigError(
            f"AutoShardPolicy.{policy.name}: the batch size of the data set is not known. Call batch() once, or set "
            "options.experimental_distribute.auto_shard_policy to DATA."
        )
    check_global_batch(global_batch, pipeline.count)
    own = dataset
    if policy is not AutoShardPolicy.OFF:
        for files in _file_names(dataset):
            check_order(files)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy(policy.value)
        own = _AutoShardDataset(dataset.with_options(options), pipeline.count, pipeline.index)
    return own.rebatch(pipeline.batch_sizes(global_batch))


def chain(dataset: Any) -> Iterator[Any]:
    """Yields ``dataset`` and all data sets that it is derived from."""
    yield dataset
    for inner in dataset._inputs():
        yield from chain(inner)


def check_order(dataset: Any) -> None:
    """Raises a ``ConfigError`` if the order of ``dataset`` may differ between processes, which prevents sharding."""
    for each in chain(dataset):
        seeds = [(getattr(each, "_seed", None), getattr(each, "_seed2", None))]
        seeds += [op.inputs[2:4] for op in _operations(each) if op.type.startswith("ShuffleDataset")]
        if any(_is_zero(first) and _is_zero(second) for first, second in seeds):
            raise ConfigError(
                "the tf.data.Dataset is shuffled without a seed, so its order differs between processes, and their "
                "parts would repeat and miss examples. Pass shuffle(…, seed=…) or list_files(…, seed=…), or create the "
                "data set after the strategy, which sets the same seed on all processes."
            )


def _is_zero(seed: Any) -> bool:
    import tensorflow as tf

    return seed is not None and tf.get_static_value(seed) == 0


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
    import tensorflow as tf

    counts = []
    for names in _file_names(dataset):
        number = int(names.cardinality())
        if number == tf.data.UNKNOWN_CARDINALITY:
            number = int(names.reduce(tf.constant(0, tf.int64), lambda count, _: count + 1))
        counts.append(2**31 if number == tf.data.INFINITE_CARDINALITY else number)
    return min(counts, default=0)
