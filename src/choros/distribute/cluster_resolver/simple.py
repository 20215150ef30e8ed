"""The resolver of a cluster that the script specifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from choros.distribute.cluster_resolver.cluster_spec import ClusterSpec, Described
from choros.distribute.cluster_resolver.resolver import ClusterResolver, url

__all__ = ["SimpleClusterResolver"]


@final
class SimpleClusterResolver(ClusterResolver):
    """Returns the values that it was given: tf.distribute.cluster_resolver.SimpleClusterResolver.

    Args:
        cluster_spec: the tasks; a ``ClusterSpec``, including TensorFlow's, or a dictionary of lists of addresses.
        master: the result of ``master()`` without a task.
        task_type: this process' job. A strategy needs it, and ``task_id``.
        task_id: its index in this job.
        environment: the value of this attribute.
        num_accelerators: kind of accelerator → their number per task.
        rpc_layer: the prefix of addresses.

    Raises:
        ConfigError: ``cluster_spec`` does not describe a cluster.

    Example:
        >>> resolver = SimpleClusterResolver({"worker": ["a:2222", "b:2222"]}, task_type="worker", task_id=1)
        >>> resolver.master("worker", 0, rpc_layer="grpc")
        'grpc://a:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Described | Mapping[str, Sequence[str]],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver``."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """See ``ClusterResolver``."""
        layer = rpc_layer or self.rpc_layer
        own = f"{layer}://{self._master}" if layer and self._master else self._master
        return url(self._cluster_spec, task_type, task_id, layer) or own

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """See ``ClusterResolver``."""
        del task_type, task_id, config_proto
        return dict(self._num_accelerators)
