"""The resolver of the cluster in ``TF_CONFIG``; and the ``TF_CONFIG`` of any resolver's cluster."""

import os
from typing import final

from choros.distribute.cluster_resolver.resolver import ClusterResolver, ClusterSpec
from choros.errors import ConfigError
from choros.topology import TFConfig, read_tf_config


@final
class TFConfigClusterResolver(ClusterResolver):
    """Reads ``TF_CONFIG``, on every call: tf.distribute.cluster_resolver.TFConfigClusterResolver.

    Args:
        task_type: overrides the type of the task in ``TF_CONFIG``.
        task_id: overrides its index.
        rpc_layer: overrides its ``"rpc_layer"``.
        environment: the value of this attribute.

    Every method raises a ``ConfigError`` if ``TF_CONFIG`` is malformed. Without it there are no jobs and no task.

    Example:
        >>> import json, os
        >>> cluster = {"worker": ["a:2222", "b:2222"]}
        >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
        >>> resolver = TFConfigClusterResolver()
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'b:2222')
        >>> del os.environ["TF_CONFIG"]
        >>> resolver.cluster_spec().jobs
        []
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self.environment = environment or ""

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        config = self._read()
        return self._task_type if config is None else config.role

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        config = self._read()
        return self._task_id if config is None else config.index

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix that TensorFlow adds to addresses."""
        config = self._read()
        return self._rpc_layer if self._rpc_layer is not None or config is None else config.rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver``."""
        config = self._read()
        return ClusterSpec({} if config is None else config.cluster)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """See ``ClusterResolver``; also empty if the cluster has a single task."""
        cluster = self.cluster_spec()
        if sum(map(cluster.num_tasks, cluster.jobs)) <= 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    def _read(self) -> TFConfig | None:
        return read_tf_config(os.environ, self._task_type, self._task_id)


def tf_config_of(resolver: ClusterResolver) -> str:
    """Returns the ``TF_CONFIG`` with which this process joins the cluster that ``resolver`` finds.

    A strategy sets it in the environment before it joins, so that all code that reads this process's rank has one
    source, also in child processes.

    Returns:
        The value; empty if there is no cluster, which readers of ``TF_CONFIG`` treat as unset.

    Raises:
        ConfigError: the cluster is malformed, or the resolver does not know the task of this process.

    Example:
        >>> from choros.distribute.cluster_resolver import SimpleClusterResolver
        >>> tf_config_of(SimpleClusterResolver({"worker": ["a:1"]}, task_type="worker", task_id=0))
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        >>> tf_config_of(SimpleClusterResolver({}))
        ''
    """
    name = type(resolver).__name__
    cluster = resolver.cluster_spec()
    if not cluster.jobs:
        return ""
    if resolver.task_type is None or resolver.task_id is None:
        raise ConfigError(
            f"{name} does not know which task of the cluster this process is: set its task_type and task_id, which "
            'differ between processes, such as resolver.task_type = "worker"; resolver.task_id = 0.'
        )
    try:
        return TFConfig.of(cluster.as_dict(), resolver.task_type, resolver.task_id).text()
    except ConfigError as error:
        raise ConfigError(f"{name}'s cluster cannot be used. {error} It is {cluster.as_dict()!r}.") from None
