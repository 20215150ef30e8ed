"""What every cluster resolver can tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from choros.distribute.cluster_resolver.cluster_spec import ClusterSpec

__all__ = ["ClusterResolver", "url"]


class ClusterResolver(ABC):
    """Finds out the tasks of the cluster, and which of them this process is.

    Own resolvers derive from it, as from tf.distribute's.

    Attributes:
        task_type: this process' job, such as ``"worker"``; ``None`` if that is not known. May be set.
        task_id: this process' place in its job; likewise.
        rpc_layer: a word to put in front of addresses, such as ``"grpc"``. choros makes no use of it.
        environment: a name for the surroundings; empty outside Google.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the cluster as they are now; without jobs if there is no cluster."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, this process by default; empty if it is not known. A thing of TensorFlow 1."""

    @abstractmethod
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Kind of accelerator → how many of it a task has; empty where the framework is to be asked instead."""


def url(cluster: ClusterSpec, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
    """A task's address as TensorFlow writes it; empty if it is not known which task is meant.

    Example:
        >>> cluster = ClusterSpec({"worker": ["a:2222"]})
        >>> url(cluster, "worker", 0, "grpc"), url(cluster, "worker", 0, None), url(cluster, "worker", None, "grpc")
        ('grpc://a:2222', 'a:2222', '')
    """
    if task_type is None or task_id is None:
        return ""
    address = cluster.task_address(task_type, task_id)
    return f"{rpc_layer}://{address}" if rpc_layer else address
