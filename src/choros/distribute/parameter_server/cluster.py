"""The processes of a parameter-server job, as the cluster resolver describes them."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from choros.comm import is_initialized
from choros.comm.exit_code import exit_with_code_of_loss
from choros.comm.waiting import LongWait, Reporter
from choros.config import Config
from choros.distribute.parameter_server.client import Servers
from choros.distribute.parameter_server.messages import Hello
from choros.errors import ConfigError
from choros.observe.listeners import start_listeners
from choros.topology import TFConfig
from choros.transport.address import this_host
from choros.transport.channel import Channel, connect
from choros.transport.secret import Key, job_key

__all__ = ["CHIEF", "Cluster", "Receive", "this_process"]

#: How a process receives the next message of a channel.
Receive = Callable[[Channel], Any]
_POLL_MILLISECONDS = 250

#: The name of the chief, which it proves to the others.
CHIEF = "the chief"

_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"chief": ["host:port"], "worker": ["host:port", …], "ps": ["host:port", …]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


@dataclass(frozen=True)
class Cluster:
    """The addresses of a job's processes, and the role of this process.

    ::

        chief ────► worker 0, 1, …      connects when they listen, and again when one was restarted
          │             │
          └─────────────┴───► ps 0, 1, …

    Workers and parameter servers listen at their addresses; nothing listens at the chief's, which is optional.

    Attributes:
        workers: the workers' addresses.
        ps: the parameter servers' addresses.
        role: the role of this process: ``chief``, ``worker``, ``ps`` or ``evaluator``.
        index: the index of this process within its role.
        start_seconds: how long processes wait for each other to start.
        key: the job's key, with which the processes authenticate each other.
    """

    workers: tuple[str, ...]
    ps: tuple[str, ...]
    role: str
    index: int
    start_seconds: float
    key: Key = field(repr=False)

    @classmethod
    def of(cls, spec: Any, role: str | None, index: int | None) -> Cluster:
        """Returns the cluster that ``spec`` describes.

        Args:
            spec: a ``ClusterSpec``.
            role: the role of this process; ``None`` is the chief.
            index: its index.

        Raises:
            ConfigError: workers or parameter servers are missing, this process is not part of the cluster, or the key
                is missing.
        """
        exit_with_code_of_loss()
        _start_listeners()
        missing = [name for name in ("worker", "ps") if not spec.as_dict().get(name)]
        if missing:
            raise ConfigError(
                "ParameterServerStrategy needs a cluster with workers and parameter servers; this one has no "
                f"{' and no '.join(missing)}. Start the script with chorosrun --ps 1 -np 2, start servers with "
                f"distribute.Server, or start every process with {_EXAMPLE}."
            )
        is_chief = role is None or (role == "chief" and "chief" not in spec.jobs)
        task = TFConfig.of(spec.as_dict(), *(("worker", 0) if is_chief else (role, index)))
        workers, ps = task.cluster["worker"], task.cluster["ps"]
        start_seconds = Config.from_environ(os.environ).start_timeout
        key = job_key(os.environ, [*workers, *ps])
        return cls(workers, ps, *(("chief", 0) if is_chief else (task.role, task.index)), start_seconds, key)

    def rank(self, role: str, index: int) -> int:
        """Returns the rank of a process, as ``chorosrun --ps`` numbers them: the chief, the servers, the workers."""
        return {"chief": 0, "ps": 1 + index}.get(role, 1 + len(self.ps) + index)

    def waits_for(self, role: str, index: int, call: str) -> Receive:
        """Returns how this process receives what a worker or a parameter server sends: a long wait is reported."""
        ranks = (self.rank(self.role, self.index), self.rank(role, index))
        return partial(_receive, describe=lambda: LongWait(f"{call} {_name(role, index)}", ranks))

    @property
    def name(self) -> str:
        """The name of this process, which it proves to the others."""
        return CHIEF if self.role == "chief" else _name(self.role, self.index)

    @property
    def address(self) -> str:
        """The address at which this process listens: a worker or a parameter server."""
        return (self.ps if self.role == "ps" else self.workers)[self.index]

    def connect(self, role: str, index: int, seconds: float | None = None) -> Channel:
        """Returns a channel to a worker or a parameter server, which proves that it is this one.

        Args:
            role: its role.
            index: its index.
            seconds: how long to wait for it; by default ``start_seconds``.
        """
        address = (self.ps if role == "ps" else self.workers)[index]
        return connect(address, self.key, self.name, _name(role, index), seconds or self.start_seconds)

    def servers(self, job: str) -> Servers:
        """Connects to all parameter servers, for this job."""
        channels = []
        for index in range(len(self.ps)):
            channel = self.connect("ps", index)
            channel.send(Hello(job, this_process()))
            channels.append(channel)
        receives = [self.waits_for("ps", index, "a request to") for index in range(len(self.ps))]
        return Servers(channels, receives, slots=self.role == "chief")


def _receive(channel: Channel, describe: Callable[[], LongWait]) -> Any:
    """Receives the next message of a channel.

    Args:
        channel: the channel.
        describe: returns the wait, which is reported when it is long.

    Raises:
        ChannelClosed: the peer is gone.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    with Reporter(describe) as reporter:
        while not poll.poll(_POLL_MILLISECONDS):
            reporter.check()
    return channel.receive()


@cache
def _start_listeners() -> None:
    """Reports waits to chorosrun, in a process that does not call ``init()``."""
    if not is_initialized():
        start_listeners(Config.from_environ(os.environ), os.environ)


def this_process() -> tuple[str, int]:
    """Returns the host and the number of this process."""
    return this_host(), os.getpid()


def _name(role: str, index: int) -> str:
    return f"parameter server {index}" if role == "ps" else f"{role} {index}"
