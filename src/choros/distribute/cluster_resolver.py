"""Cluster resolvers, which find the processes of a cluster: tf.distribute.cluster_resolver.

::

    from choros import distribute
    resolver = distribute.cluster_resolver.SlurmClusterResolver()
    strategy = distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)

A strategy without a resolver reads the environment, as `TFConfigClusterResolver` does; under chorosrun none is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

from choros.distribute.resolvers import (
    ClusterResolver,
    ClusterSpec,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SlurmClusterResolver,
)
from choros.errors import ConfigError, EngineUnavailable
from choros.topology import TFConfig, read_tf_config

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "tf_config_of",
]


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
        cluster_spec: Any,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._accelerators = num_accelerators or {}
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver``."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """See ``ClusterResolver``."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{self._master}" if layer and self._master else self._master


def _of_tf_config(name: str) -> Any:
    """Returns a property of ``TFConfigClusterResolver``: this part of ``TF_CONFIG``, else what it was given."""

    def read(resolver: TFConfigClusterResolver) -> Any:
        config = resolver._read()
        return resolver._given[name] if config is None else getattr(config, name)

    def override(resolver: TFConfigClusterResolver, value: Any) -> None:
        resolver._given[name] = value

    return property(read, override)


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

    task_type = _of_tf_config("role")
    task_id = _of_tf_config("index")
    rpc_layer = _of_tf_config("rpc_layer")

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._given: dict[str, Any] = {"role": task_type, "index": task_id, "rpc_layer": rpc_layer}
        self.environment = environment or ""

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
        config = read_tf_config(os.environ, self._given["role"], self._given["index"])
        layer = self._given["rpc_layer"]
        return config if config is None or layer is None else replace(config, rpc_layer=layer)


@final
class TPUClusterResolver(ClusterResolver):
    """Returns the TPUs that JAX has found: tf.distribute.cluster_resolver.TPUClusterResolver.

    TensorFlow needs a resolver to reach TPUs over the network. JAX finds the TPUs of its host itself, so a script needs
    no resolver, and code that connects TensorFlow to TPUs can be removed.

    Args:
        tpu: TensorFlow's name of a TPU; has no effect.
        kwargs: TensorFlow's other arguments; have no effect.

    Example:
        >>> TPUClusterResolver("").cluster_spec().jobs
        []
    """

    def __init__(self, tpu: str | None = None, **kwargs: Any) -> None:
        pass

    @classmethod
    def connect(cls, tpu: str | None = None, **kwargs: Any) -> TPUClusterResolver:
        """Returns a resolver, after checking that there are TPUs.

        Raises:
            EngineUnavailable: there are no TPUs.
        """
        resolver = cls(tpu, **kwargs)
        resolver.tpu_devices()
        return resolver

    def tpu_devices(self) -> list[Any]:
        """Returns JAX's devices of this process; initialises JAX.

        Raises:
            EngineUnavailable: they are not TPUs.
        """
        import jax

        devices = jax.local_devices()
        if devices[0].platform != "tpu":
            names = ", ".join(f"{device.platform}:{device.local_hardware_id or device.id}" for device in devices)
            raise EngineUnavailable(
                f"this process has no TPU: JAX {jax.__version__} runs on the platform {devices[0].platform!r} and has "
                f"found {names}. On a host with TPUs: pip install 'jax[tpu]'. On other hosts use MirroredStrategy, "
                "which uses all devices."
            )
        return list(devices)

    def cluster_spec(self) -> ClusterSpec:
        """Returns a specification without jobs: the launcher provides the processes' addresses."""
        return ClusterSpec({})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Empty."""
        return ""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The TPUs of this process."""
        return {"TPU": len(self.tpu_devices())}


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
