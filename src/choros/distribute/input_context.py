"""The arguments of functions that create a replica's data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from choros.errors import ConfigError

__all__ = ["InputContext", "InputOptions", "InputReplicationMode", "ValueContext"]


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


class InputReplicationMode(Enum):
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
