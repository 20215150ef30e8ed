"""A job, as asked for: what runs, how often, where. Frozen, and checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from choros.errors import ConfigError
from choros.launch.plan.hosts import Host, total_slots
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.wrapper_options import Options

__all__ = ["Job", "Ssh"]


@dataclass(frozen=True)
class Ssh:
    """How to get onto other hosts.

    Attributes:
        port: the port of their ssh servers.
        identity_file: the private key to show them.
        command: what to call in ssh's place, as ``command host words…``.
    """

    port: int | None = None
    identity_file: str | None = None
    command: str | None = None

    def words(self) -> list[str]:
        """The command that reaches a host, up to the host's name.

        Example:
            >>> Ssh(port=2222).words()
            ['ssh', '-o', 'BatchMode=yes', '-p', '2222']
        """
        if self.command is not None:
            return [self.command]
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity_file is None else ["-i", self.identity_file]
        return ["ssh", "-o", "BatchMode=yes", *port, *identity]


@dataclass(frozen=True)
class Job:
    """What runs, how often, where.

    Attributes:
        command: the words of the command that every rank runs.
        size: how many ranks; with parameter servers: the chief, these and the workers.
        hosts: where; empty: here, or wherever the cluster's scheduler has given us room.
        remote: the hosts that are not this machine.
        environment: variables to set for every rank.
        ssh: how to get onto other hosts.
        network_interfaces: the interfaces to communicate through; empty: all that connect.
        tcp: communicate through TCP only.
        mpi_args: further words for mpirun.
        binding_args: words for mpirun that bind ranks to cores, in place of choros' own binding.
        options: how the worker wrappers behave.
        servers: how many of the processes are parameter servers.
    """

    command: tuple[str, ...]
    size: int
    hosts: tuple[Host, ...] = ()
    remote: tuple[Host, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh: Ssh = field(default_factory=Ssh)
    network_interfaces: tuple[str, ...] = ()
    tcp: bool = False
    mpi_args: tuple[str, ...] = ()
    binding_args: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    servers: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"-np {self.size}: a job has at least one rank.")
        if self.servers and self.roles.workers < 1:
            raise ConfigError(
                f"--ps {self.servers}: besides a chief and {self.servers} ps there must be a worker, which makes "
                f"{self.servers + 2} slots at least. Give -np, or hosts with more slots."
            )
        slots = total_slots(self.hosts)
        if self.hosts and self.size > slots:
            listed = ",".join(map(str, self.hosts[:8])) + (",…" if len(self.hosts) > 8 else "")
            raise ConfigError(
                f"{self._asked()} than the hosts have slots: {listed} "
                f"{'have' if len(self.hosts) > 1 else 'has'} {slots}. "
                f"Give hosts more slots (name:slots), name more hosts, or ask for fewer {self.roles.kind(self.size)}."
            )

    @property
    def roles(self) -> Roles:
        """Who is what, if there are parameter servers."""
        return Roles(self.servers, self.size - 1 - self.servers) if self.servers else NO_ROLES

    def _asked(self) -> str:
        if not self.servers:
            return f"-np {self.size} asks for more ranks"
        return f"--ps {self.servers} -np {self.roles.workers} asks for more processes, {self.size} with the chief,"
