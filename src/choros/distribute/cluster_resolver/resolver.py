"""The interface of cluster resolvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from choros.distribute.cluster_resolver.cluster_spec import ClusterSpec

__all__ = ["ClusterResolver", "url"]


class ClusterResolver(ABC):
    """Finds the tasks of the cluster, and the task of this process.

    Users may derive their own resolvers from it, as from tf.distribute's.

    Attributes:
        task_type: this process' job, such as ``"worker"``; ``None`` if it is unknown. May be set.
        task_id: the index of this process in its job; likewise.
        rpc_layer: a prefix of addresses, such as ``"grpc"``. choros does not use it.
        environment: the name of the environment; empty outside Google.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current tasks of the cluster; a specification without jobs if there is no cluster."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, by default this process's; empty if it is unknown. Used by TensorFlow 1."""

    @abstractmethod
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Returns the number of accelerators of a task by kind; empty where the framework counts them itself."""


def url(cluster: ClusterSpec, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
    """Returns a task's address in TensorFlow's notation; empty if the task is unknown.

    Example:
        >>> cluster = ClusterSpec({"worker": ["a:2222"]})
        >>> url(cluster, "worker", 0, "grpc"), url(cluster, "worker", 0, None), url(cluster, "worker", None, "grpc")
        ('grpc://a:2222', 'a:2222', '')
    """
    if task_type is None or task_id is None:
        return ""
    address = cluster.task_address(task_type, task_id)
    return f"{rpc_layer}://{address}" if rpc_layer else address
