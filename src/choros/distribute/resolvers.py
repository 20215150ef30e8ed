"""The interface of cluster resolvers, and those that ask a scheduler: SLURM's variables of a job step, Kubernetes'
running pods.
"""

from __future__ import annotations

import enum
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from choros.errors import ConfigError, LaunchError
from choros.topology import expand_counts, expand_hosts

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@final
@dataclass(frozen=True, init=False)
class ClusterSpec:
    """Jobs, such as ``"worker"``, each with the addresses of its tasks: tf.train.ClusterSpec.

    Args:
        cluster: job → addresses, ``host:port``, of its tasks in order; or another such object, including TensorFlow's.

    Raises:
        ConfigError: ``cluster`` is none of these.

    Example:
        >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
        >>> spec.jobs
        ['chief', 'worker']
        >>> spec.num_tasks("worker"), spec.task_address("worker", 1)
        (2, 'c:2222')
    """

    _tasks: Mapping[str, tuple[str, ...]]

    def __init__(self, cluster: Any) -> None:
        given = cluster if isinstance(cluster, Mapping) else getattr(cluster, "as_dict", lambda: None)()
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"ClusterSpec({cluster!r}): expected a dictionary with a list of addresses for each job, such as "
                '{"worker": ["host1:2222", "host2:2222"]}.'
            )
        for job, addresses in given.items():
            if not (isinstance(addresses, list | tuple) and all(isinstance(address, str) for address in addresses)):
                raise ConfigError(f"ClusterSpec: the tasks of {job!r} are {addresses!r}, not a list of addresses.")
        object.__setattr__(self, "_tasks", {job: tuple(addresses) for job, addresses in given.items()})

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def as_dict(self) -> dict[str, list[str]]:
        """Returns a mapping from each job to the addresses of its tasks.

        Example:
            >>> ClusterSpec({"worker": ("a:1",)}).as_dict()
            {'worker': ['a:1']}
        """
        return {job: list(addresses) for job, addresses in self._tasks.items()}

    def job_tasks(self, job_name: str) -> list[str]:
        """Returns the addresses of the tasks of a job.

        Raises:
            ConfigError: there is no such job.
        """
        if job_name not in self._tasks:
            raise ConfigError(
                f"There is no job {job_name!r} in the cluster; it has {', '.join(self._tasks) or 'none'}."
            )
        return list(self._tasks[job_name])

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a job; raises as ``job_tasks``."""
        return len(self.job_tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        Raises:
            ConfigError: there is no such job, or it has no such task.
        """
        tasks = self.job_tasks(job_name)
        if not 0 <= task_index < len(tasks):
            raise ConfigError(f"Job {job_name!r} has {len(tasks)} tasks, counted from 0, and no task {task_index}.")
        return tasks[task_index]


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
    _accelerators: Mapping[str, int] = {}

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current tasks of the cluster; a specification without jobs if there is no cluster."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, by default this process's; empty if it is unknown. Used by TensorFlow 1."""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            return ""
        address = self.cluster_spec().task_address(job, index)
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{address}" if layer else address

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Returns the number of accelerators of a task by kind; empty where the framework counts them itself."""
        return dict(self._accelerators)


@final
class SlurmClusterResolver(ClusterResolver):
    """Assigns the tasks that ``srun`` has started to jobs: tf.distribute.cluster_resolver.SlurmClusterResolver.

    Tasks are assigned in the order of ``SLURM_PROCID``, to the jobs in the order of their names: chief, then ps, then
    worker. Unlike in tf.distribute, hosts are in the order in which SLURM names them, which is that of the ranks; this
    process' task is known at once; and no command is run to count GPUs.

    Args:
        jobs: job → number of tasks. Default: all are workers.
        port_base: the port of each host's first task; the second one has the next port, and so on.
        gpus_per_node: GPUs of a host. Default: SLURM's number, else as many as ``CUDA_VISIBLE_DEVICES`` lists.
        gpus_per_task: GPUs of a task. Default: a host's GPUs divided by its tasks.
        tasks_per_node: tasks of every host, or host → tasks, in the order of ranks. Default: SLURM's.
        auto_set_gpu: ``cluster_spec()`` restricts ``CUDA_VISIBLE_DEVICES`` to this task's GPUs, unless SLURM has.
        rpc_layer: the prefix of addresses in ``master()``.

    Raises:
        ConfigError: this is not a SLURM job step, or the numbers contradict each other or SLURM's.

    Example:
        >>> import os
        >>> os.environ |= {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}
        >>> os.environ |= {"SLURM_STEP_NODELIST": "b2,a[01-02]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
        >>> resolver = SlurmClusterResolver({"chief": 1, "worker": 2})
        >>> resolver.cluster_spec().as_dict()
        {'chief': ['b2:8888'], 'worker': ['a01:8888', 'a02:8888']}
        >>> resolver.get_task_info()
        ('worker', 1)
        >>> for name in [name for name in os.environ if name.startswith("SLURM_")]:
        ...     del os.environ[name]
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self.rpc_layer = rpc_layer
        rank = _number("SLURM_PROCID")
        counts = _tasks_of_hosts(tasks_per_node)
        slots = [(host, local) for host, count in counts.items() for local in range(count)]
        requested = dict(sorted(jobs.items())) if jobs is not None else {"worker": _number("SLURM_STEP_NUM_TASKS")}
        tasks = [(job, index) for job, count in requested.items() for index in range(count)]
        if len(tasks) != len(slots):
            raise ConfigError(
                f"SlurmClusterResolver: jobs {requested} have {len(tasks)} tasks, but SLURM has started {len(slots)} "
                f"({', '.join(f'{count} on {host}' for host, count in counts.items())}). Start the script with srun "
                f"--ntasks={len(tasks)}, or change the jobs."
            )
        if not 0 <= rank < len(tasks):
            raise ConfigError(f"SLURM_PROCID={rank}, but there are {len(tasks)} tasks, counted from 0.")
        host, local = slots[rank]
        _check_position(rank, list(counts).index(host), local)
        self.task_type, self.task_id = tasks[rank]
        addresses = (f"{host}:{port_base + local}" for host, local in slots)
        self._cluster_spec = ClusterSpec({job: list(islice(addresses, count)) for job, count in requested.items()})
        on_node = gpus_per_node if gpus_per_node is not None else int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
        visible = _visible_gpus(on_node)
        on_node = on_node or len(visible)
        largest = max(counts.values())
        gpus = on_node // largest if gpus_per_task is None else gpus_per_task
        if gpus * largest > on_node:
            raise ConfigError(
                f"SlurmClusterResolver: {largest} tasks on one host with gpus_per_task={gpus} need more GPUs than its "
                f"{on_node}. Request more from SLURM (srun --gpus-per-node), or fewer per task."
            )
        self._accelerators = {"GPU": gpus}
        own = visible[local * gpus : (local + 1) * gpus]
        self._task_gpus = ",".join(own) if auto_set_gpu and len(visible) >= on_node else ""

    def cluster_spec(self) -> ClusterSpec:
        """See ``ClusterResolver``."""
        if self._task_gpus:
            os.environ[_VISIBLE] = self._task_gpus
        return self._cluster_spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """``(task_type, task_id)``."""
        return self.task_type, self.task_id


def _tasks_of_hosts(given: int | Mapping[str, int] | None) -> dict[str, int]:
    """Returns host → number of its tasks, in the order of ranks."""
    if isinstance(given, Mapping):
        return dict(given)
    hosts = expand_hosts(_text("SLURM_STEP_NODELIST"))
    if given is not None:
        return dict.fromkeys(hosts, given)
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = expand_counts(_text(name), name)
    if len(counts) != len(hosts):
        raise ConfigError(f"{name}={_text(name)!r} has {len(counts)} hosts, but SLURM_STEP_NODELIST has {len(hosts)}.")
    return dict(zip(hosts, counts, strict=True))


def _check_position(rank: int, host: int, local: int) -> None:
    """Checks the assumption that ranks fill one host after the other, for this rank."""
    for name, expected in (("SLURM_NODEID", host), ("SLURM_LOCALID", local)):
        if os.environ.get(name, str(expected)) != str(expected):
            raise ConfigError(
                f"SLURM_PROCID={rank} has {name}={os.environ[name]}, but expected {expected}: the ranks do not fill "
                "one host after the other. Start the script with srun --distribution=block."
            )


def _visible_gpus(on_node: int) -> list[str]:
    """Returns the GPUs of this host that this process may use, by their CUDA names."""
    if _VISIBLE in os.environ:
        return [name for name in os.environ[_VISIBLE].split(",") if name]
    return [str(number) for number in range(on_node)]


def _text(name: str) -> str:
    text = os.environ.get(name)
    if not text:
        raise ConfigError(f"{name} is not set: this is not a SLURM job step. Start the script with srun.")
    return text


def _number(name: str) -> int:
    text = _text(name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a whole number.")
    return int(text)


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
