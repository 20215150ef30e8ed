"""The processes of a parameter-server job, as the cluster resolver describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from choros.config import Config
from choros.distribute.parameter_server.client import Servers
from choros.distribute.parameter_server.messages import Hello
from choros.errors import ConfigError
from choros.topology import TFConfig
from choros.transport.channel import Channel, connect
from choros.transport.secret import Key, job_key

__all__ = ["CHIEF", "Cluster"]

#: The name of the chief, which it proves to the others.
CHIEF = "the chief"

_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"chief": ["host:port"], "worker": ["host:port", …], "ps": ["host:port", …]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


@dataclass(frozen=True)
class Cluster:
    """The addresses of a job's processes, and the role of this process.

    Attributes:
        chief: the chief's address.
        workers: the workers' addresses.
        ps: the parameter servers' addresses.
        role: the role of this process: ``chief``, ``worker``, ``ps`` or ``evaluator``.
        index: the index of this process within its role.
        start_seconds: how long processes wait for each other to start.
        key: the job's key, with which the processes authenticate each other.
    """

    chief: str
    workers: tuple[str, ...]
    ps: tuple[str, ...]
    role: str
    index: int
    start_seconds: float
    key: Key = field(repr=False)

    @classmethod
    def of(cls, resolver: Any) -> Cluster:
        """Returns the cluster that ``resolver`` describes.

        Raises:
            ConfigError: a role is missing, this process is not part of the cluster, or the key is missing.
        """
        spec = resolver.cluster_spec()
        missing = [role for role in ("chief", "worker", "ps") if role not in spec.jobs]
        if missing:
            raise ConfigError(
                "ParameterServerStrategy needs a cluster with a chief, workers and parameter servers; this one has no "
                f"{' and no '.join(missing)}. Start the script with chorosrun --ps 1 -np 2, or start every process "
                f"with {_EXAMPLE}."
            )
        task = TFConfig.of(spec.as_dict(), resolver.task_type, resolver.task_id)
        (chief,), workers, ps = (task.cluster[role] for role in ("chief", "worker", "ps"))
        start_seconds = Config.from_environ(os.environ).start_timeout
        return cls(chief, workers, ps, task.role, task.index, start_seconds, job_key(os.environ, [chief, *ps]))

    @property
    def name(self) -> str:
        """The name of this process, which it proves to the others."""
        return {"chief": CHIEF, "ps": _server(self.index)}.get(self.role, f"{self.role} {self.index}")

    def connect(self, address: str, peer: str) -> Channel:
        """Returns a channel to the process at ``address``, which proves that it is ``peer``."""
        return connect(address, self.key, self.name, peer, self.start_seconds)

    def servers(self, hello: Hello) -> Servers:
        """Connects to all parameter servers."""
        channels = []
        for index, address in enumerate(self.ps):
            channel = self.connect(address, _server(index))
            channel.send(hello)
            channels.append(channel)
        return Servers(channels, slots=self.role == "chief")


def _server(index: int) -> str:
    return f"parameter server {index}"
