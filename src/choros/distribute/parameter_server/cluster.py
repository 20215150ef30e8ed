"""The processes of a ParameterServer job, as a resolver tells them."""

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
from choros.transport.secret import job_key

__all__ = ["Cluster"]

_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"chief": ["host:port"], "worker": ["host:port", …], "ps": ["host:port", …]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


@dataclass(frozen=True)
class Cluster:
    """Where everybody is, and which of them this process is.

    Attributes:
        chief: its address.
        workers: theirs.
        ps: those of the parameter servers.
        role: this process's: ``chief``, ``worker``, ``ps`` or ``evaluator``.
        index: which of its role it is.
        start_seconds: how long processes wait for each other to start.
        key: by which they know each other.
    """

    chief: str
    workers: tuple[str, ...]
    ps: tuple[str, ...]
    role: str
    index: int
    start_seconds: float
    key: bytes = field(repr=False)

    @classmethod
    def of(cls, resolver: Any) -> Cluster:
        """The cluster that ``resolver`` tells.

        Raises:
            ConfigError: it has not all of the roles, this process is none of them, or the key is missing.
        """
        spec = resolver.cluster_spec()
        missing = [role for role in ("chief", "worker", "ps") if role not in spec.jobs]
        if missing:
            raise ConfigError(
                "ParameterServerStrategy needs a cluster with a chief, workers and parameter servers; this one has no "
                f"{' and no '.join(missing)}. Start the script with chorosrun --ps 1 -np 2, or every process of it "
                f"with {_EXAMPLE}."
            )
        task = TFConfig.of(spec.as_dict(), resolver.task_type, resolver.task_id)
        (chief,), workers, ps = (task.cluster[role] for role in ("chief", "worker", "ps"))
        start_seconds = Config.from_environ(os.environ).start_timeout
        return cls(chief, workers, ps, task.role, task.index, start_seconds, job_key(os.environ, [chief, *ps]))

    def connect(self, address: str, peer: str) -> Channel:
        """A channel to the process at ``address``."""
        return connect(address, self.key, peer, self.start_seconds)

    def servers(self, hello: Hello) -> Servers:
        """The way to all parameter servers."""
        channels = []
        for index, address in enumerate(self.ps):
            channel = self.connect(address, f"parameter server {index}")
            channel.send(hello)
            channels.append(channel)
        return Servers(channels, slots=hello.role == "chief")
