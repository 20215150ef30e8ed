"""What functions that make a replica's data are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from choros.errors import ConfigError

__all__ = ["InputContext", "InputOptions", "ValueContext"]


@dataclass(frozen=True)
class InputContext:
    """What a function that makes a data set is told (``tf.distribute.InputContext``).

    Attributes:
        num_input_pipelines: how many such functions there are: one a process.
        input_pipeline_id: which of them this is.
        num_replicas_in_sync: replicas of all processes.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The batch of one replica.

        Raises:
            ConfigError: the replicas cannot share ``global_batch_size`` equally.

        Example:
            >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128)
            32
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ConfigError(
                f"a global batch of {global_batch_size} examples cannot be shared equally by "
                f"{self.num_replicas_in_sync} replicas: take a multiple of {self.num_replicas_in_sync}."
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """What a function that makes a replica's value is told (``tf.distribute.experimental.ValueContext``)."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True)
class InputOptions:
    """``tf.distribute.InputOptions``, for scripts that pass it; choros needs none of it, and it has no effect."""

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: Any = None
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
