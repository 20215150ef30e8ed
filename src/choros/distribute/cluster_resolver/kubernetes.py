"""The resolver of the running pods of a Kubernetes cluster."""

import enum
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, final

from choros.distribute.cluster_resolver.resolver import ClusterResolver, ClusterSpec
from choros.errors import ConfigError, LaunchError


class KubernetesExecutableLocation(enum.Enum):
    """The location of this process: in a pod of the cluster, or outside."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


@final
class KubernetesClusterResolver(ClusterResolver):
    """Queries Kubernetes for the pods with given labels: tf.distribute.cluster_resolver.KubernetesClusterResolver.

    It cannot know which pod this process is in: set ``task_type`` and ``task_id`` afterwards.

    Args:
        job_to_label_mapping: job → label selectors of its pods, in this order; the pods of a selector are sorted by
            name. Default: workers with ``job-name=tensorflow``.
        tf_server_port: the port of every task.
        rpc_layer: the prefix of addresses in ``master()``.
        override_client: a ``kubernetes.client.CoreV1Api`` with its own credentials.
        executable_location: in the cluster, pods are reached at their own addresses; from outside, at their hosts'.

    Raises:
        ConfigError: the package ``kubernetes`` is not installed.

    Example:
        >>> from types import SimpleNamespace as Is
        >>> pod = Is(metadata=Is(name="w-0"), status=Is(phase="Running", pod_ip="10.1.0.7", host_ip="10.0.0.1"))
        >>> client = Is(list_pod_for_all_namespaces=lambda label_selector: Is(items=[pod]))
        >>> KubernetesClusterResolver(override_client=client).cluster_spec().as_dict()
        {'worker': ['10.1.0.7:8470']}
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        self.rpc_layer = rpc_layer
        self._selectors = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port = tf_server_port
        self._within = executable_location is KubernetesExecutableLocation.WITHIN_CLUSTER
        self._client = override_client if override_client is not None else _client(self._within)

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver``; queries Kubernetes each time.

        Raises:
            LaunchError: a pod is not running.
        """
        return ClusterSpec(
            {
                job: [self._address(pod) for selector in selectors for pod in self._pods(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _pods(self, selector: str) -> list[Any]:
        found = self._client.list_pod_for_all_namespaces(label_selector=selector)
        return sorted(found.items, key=lambda pod: pod.metadata.name)

    def _address(self, pod: Any) -> str:
        if pod.status.phase != "Running":
            raise LaunchError(
                f"KubernetesClusterResolver: pod {pod.metadata.name} is {pod.status.phase}, but all must be Running. "
                "Wait for it (kubectl wait --for=condition=Ready pod/…), or use narrower selectors."
            )
        host = pod.status.pod_ip if self._within else pod.status.host_ip
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"


def _client(within: bool) -> Any:
    """Returns a Kubernetes client with this pod's credentials or the user's."""
    try:
        kubernetes = importlib.import_module("kubernetes")
        config = importlib.import_module("kubernetes.config")
    except ImportError as error:
        raise ConfigError(
            f"KubernetesClusterResolver needs the package kubernetes, which cannot be imported ({error}): pip install "
            "kubernetes. Or pass a client as override_client."
        ) from error
    if within:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return kubernetes.client.CoreV1Api()
