"""The interface of cluster resolvers, the cluster that they find, and the resolver of one that the script specifies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from choros.errors import ConfigError


class Described(Protocol):
    """An object that describes a cluster as a dictionary, such as ``tf.train.ClusterSpec``."""

    def as_dict(self) -> Mapping[str, Sequence[str]]:
        """Returns a mapping from each job to the addresses of its tasks."""


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

    def __init__(self, cluster: Mapping[str, Sequence[str]] | Described) -> None:
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
        del task_type, task_id, config_proto
        return {}


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
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{self._master}" if layer and self._master else self._master

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """See ``ClusterResolver``."""
        del task_type, task_id, config_proto
        return dict(self._num_accelerators)
