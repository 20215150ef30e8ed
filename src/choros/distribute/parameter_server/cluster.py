"""The processes of a ParameterServer job, as a resolver tells them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from choros.config import Config
from choros.distribute.parameter_server.client import Servers
from choros.distribute.parameter_server.messages import Hello
from choros.distribute.transport import Channel, connect, job_key
from choros.errors import ConfigError

__all__ = ["Cluster"]

_ROLES = ("chief", "worker", "ps", "evaluator")
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
            ConfigError: it has not all of the roles, or this process is none of them.
        """
        tasks = {role: tuple(addresses) for role, addresses in resolver.cluster_spec().as_dict().items()}
        missing = [role for role in ("chief", "worker", "ps") if not tasks.get(role)]
        if missing or len(tasks["chief"]) != 1:
            what = f"no {' and no '.join(missing)}" if missing else f"{len(tasks['chief'])} chiefs"
            raise ConfigError(
                "ParameterServerStrategy needs a cluster with one chief, workers and parameter servers; this one has "
                f"{what}. Start the script with chorosrun --ps 1 -np 2, or every process of it with {_EXAMPLE}."
            )
        role, index = resolver.task_type, resolver.task_id
        if role not in _ROLES or index is None or (role != "evaluator" and not 0 <= index < len(tasks[role])):
            raise ConfigError(
                f"this process has the role {role!r} and the index {index!r}, which the cluster does not have: it has "
                f"{', '.join(f'{len(tasks[each])} {each}' for each in tasks)}. Say which it is, with {_EXAMPLE}."
            )
        addresses = [address for role in ("chief", "ps") for address in tasks[role]]
        config = Config.from_environ(os.environ)
        return cls(
            tasks["chief"][0],
            tasks["worker"],
            tasks["ps"],
            role,
            index,
            config.start_timeout,
            job_key(os.environ, addresses),
        )

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
        return Servers(channels)
