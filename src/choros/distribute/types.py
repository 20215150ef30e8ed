"""The values and options of ``tf.distribute``; options have no effect, and exist so that scripts run unchanged."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from choros.comm import Reduction
from choros.errors import ConfigError
from choros.parallel.structure import map_structure


class ReduceOp(enum.Enum):
    """``tf.distribute.ReduceOp``: ``SUM`` or ``MEAN``.

    Example:
        >>> ReduceOp.of("sum")
        <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, given: ReduceOp | str) -> ReduceOp:
        """Returns the operation for a member, a name, or a member of TensorFlow's own ``ReduceOp``.

        Raises:
            ConfigError: ``given`` is none of these.
        """
        name = str(getattr(given, "name", given)).upper()
        if name not in cls.__members__:
            raise ConfigError(f"reduce_op={given!r}: expected ReduceOp.SUM or ReduceOp.MEAN.")
        return cls[name]

    @property
    def engine_op(self) -> Reduction:
        """The engine's operation of the same meaning."""
        return Reduction.SUM if self is ReduceOp.SUM else Reduction.AVERAGE


@final
class PerReplica:
    """One value for each replica of this process: a result of ``strategy.run``, or a distributed batch.

    A process with one replica, the usual case, has plain values instead, as in ``tf.distribute``.

    Attributes:
        values: one for each replica of this process, in order.

    Example:
        >>> PerReplica((1.0, 3.0)).values
        (1.0, 3.0)
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(f'{index}: {value!r}' for index, value in enumerate(self.values))})"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def per_replica(values: Sequence[Any]) -> Any:
    """Combines the values of this process's replicas: plain for one replica, else with ``PerReplica`` leaves.

    >>> per_replica([{"x": 1}, {"x": 2}])
    {'x': PerReplica(0: 1, 1: 2)}
    """
    first = values[0]
    if len(values) == 1 or first is None:
        return first
    if isinstance(first, dict):
        return type(first)((key, per_replica([value[key] for value in values])) for key in first)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(per_replica, zip(*values, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(map(per_replica, zip(*values, strict=True)))
    return PerReplica(values)


def of_first(structure: Any) -> Any:
    """Replaces every ``PerReplica`` in ``structure`` by the value of this process's first replica."""
    return map_structure(lambda leaf: leaf.values[0] if isinstance(leaf, PerReplica) else leaf, structure)


@dataclass(frozen=True)
class InputContext:
    """The argument of a function that creates a data set (``tf.distribute.InputContext``).

    Attributes:
        num_input_pipelines: the number of input pipelines: one per process.
        input_pipeline_id: the index of this one.
        num_replicas_in_sync: the number of replicas of all processes.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Raises:
            ConfigError: ``global_batch_size`` is not a multiple of the number of replicas.

        Example:
            >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128)
            32
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ConfigError(
                f"a global batch of {global_batch_size} examples cannot be divided equally among "
                f"{self.num_replicas_in_sync} replicas: use a multiple of {self.num_replicas_in_sync}."
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """The argument of a function that creates a replica's value (``tf.distribute.experimental.ValueContext``)."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


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


class InputReplicationMode(enum.Enum):
    """``tf.distribute.InputReplicationMode``; a process is a worker and a replica here, so that both mean the same."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """``tf.distribute.InputOptions``, for scripts that pass it; it has no effect."""

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1


class CommunicationImplementation(enum.Enum):
    """``tf.distribute.experimental.CommunicationImplementation``."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """``tf.distribute.experimental.CommunicationOptions``."""

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO


@dataclass(frozen=True)
class RunOptions:
    """``tf.distribute.RunOptions``."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


@dataclass(frozen=True)
class NcclAllReduce:
    """``tf.distribute.NcclAllReduce``."""

    num_packs: int = 1


@dataclass(frozen=True)
class HierarchicalCopyAllReduce:
    """``tf.distribute.HierarchicalCopyAllReduce``."""

    num_packs: int = 1


@dataclass(frozen=True)
class ReductionToOneDevice:
    """``tf.distribute.ReductionToOneDevice``."""

    reduce_to_device: str | None = None
    accumulation_fn: Any = None
