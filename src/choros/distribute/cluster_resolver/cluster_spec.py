"""The tasks of a cluster and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from choros.errors import ConfigError

__all__ = ["ClusterSpec", "Described"]


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
