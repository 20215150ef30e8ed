"""A job: a command, its number of ranks and its hosts. Frozen, and validated when it is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from choros.errors import ConfigError
from choros.launch.plan.discovery import Discovery
from choros.launch.plan.elastic import Elastic
from choros.launch.plan.hosts import Host, total_slots
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.wrapper_options import WrapperOptions

__all__ = ["Job", "Ssh"]


@dataclass(frozen=True)
class Ssh:
    """How to log in to remote hosts.

    Attributes:
        port: the port of their ssh servers.
        identity_file: the private key for ssh.
        command: the argv of a program to use instead of ssh, to which the host and a command are added; empty: ssh.
    """

    port: int | None = None
    identity_file: str | None = None
    command: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """Returns the argv that logs in to a host, up to the host's name.

        Example:
            >>> Ssh(port=2222).argv()
            ['ssh', '-o', 'BatchMode=yes', '-p', '2222']
        """
        if self.command:
            return list(self.command)
        port = [] if self.port is None else ["-p", str(self.port)]
        identity = [] if self.identity_file is None else ["-i", self.identity_file]
        return ["ssh", "-o", "BatchMode=yes", *port, *identity]


@dataclass(frozen=True)
class Job:
    """A command to run on every rank, and where.

    Attributes:
        command: the argv that every rank runs.
        size: the number of ranks; with parameter servers: the chief, these and the workers.
        hosts: the hosts; empty: this machine, or the hosts that a scheduler has allocated.
        remote: the hosts that are not this machine.
        environment: variables to set for every rank.
        ssh: how to log in to remote hosts.
        network_interfaces: the interfaces to communicate through; empty: all that are connected.
        tcp: communicate only through TCP.
        mpi_args: additional arguments for mpirun.
        binding_args: mpirun's arguments that bind ranks to cores, instead of choros' own binding.
        options: the wrappers' options.
        servers: the number of parameter servers.
        elastic: the bounds of an elastic job; ``None``: all ranks end together.
        discovery: how its hosts are found out when it is started again.
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
    options: WrapperOptions = field(default_factory=WrapperOptions)
    servers: int = 0
    elastic: Elastic | None = None
    discovery: Discovery = field(default_factory=Discovery)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"-np {self.size}: a job needs at least one rank.")
        if self.servers and self.roles.workers < 1:
            raise ConfigError(
                f"--ps {self.servers}: a job needs a chief, {self.servers} ps and at least one worker, so at least "
                f"{self.servers + 2} slots. Give -np, or hosts with more slots."
            )
        slots = total_slots(self.hosts)
        if self.hosts and self.size > slots:
            listed = ",".join(map(str, self.hosts[:8])) + (",…" if len(self.hosts) > 8 else "")
            raise ConfigError(
                f"{self._requested()} than the hosts have slots: {listed} "
                f"{'have' if len(self.hosts) > 1 else 'has'} {slots}. "
                f"Give hosts more slots (name:slots), name more hosts, or request fewer {self.roles.kind(self.size)}."
            )

    @property
    def roles(self) -> Roles:
        """The roles of the processes, if there are parameter servers."""
        return Roles(self.servers, self.size - 1 - self.servers) if self.servers else NO_ROLES

    @property
    def most(self) -> int:
        """The number of ranks that the job may have at a time."""
        return self.size if self.elastic is None else self.elastic.most

    def _requested(self) -> str:
        if not self.servers:
            return f"-np {self.size} requests more ranks"
        return f"--ps {self.servers} -np {self.roles.workers} requests more processes, {self.size} with the chief,"
