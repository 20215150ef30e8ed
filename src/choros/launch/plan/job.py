"""A job: a command, its number of ranks, its hosts and its limits. Frozen, and validated when it is created."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from choros.errors import ConfigError
from choros.launch.plan.hosts import Host, total_slots
from choros.launch.plan.roles import NO_ROLES, Roles
from choros.launch.protocol.wrapper_options import WrapperOptions
from choros.settings import VARIABLES


@dataclass(frozen=True)
class Elastic:
    """The bounds of an elastic job, which ends with fewer than ``least`` ranks and grows to ``most`` on free slots, the
    wait for hosts with slots for ``least`` ranks, and how many ``resets`` it has.
    ``script`` prints its hosts, by default with ``slots``; ``None``: they are as given. ``cooldown``: for how many
    seconds a host that has failed is left out, at first and at most; ``None``: for good.

    >>> Elastic(least=2, most=4).variables()["CHOROS_MIN_NP"]
    '2'
    """

    least: int
    most: int
    timeout: float = 600.0
    resets: int | None = None
    script: str | None = None
    slots: int | None = None
    cooldown: tuple[float, float] | None = None

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that tell the ranks."""
        wanted = {
            VARIABLES["elastic"].name: "1",
            "HOROVOD_ELASTIC": "1",
            VARIABLES["min_np"].name: str(self.least),
            VARIABLES["max_np"].name: str(self.most),
            VARIABLES["elastic_timeout"].name: f"{self.timeout:g}",
        }
        return wanted if self.resets is None else {**wanted, VARIABLES["reset_limit"].name: str(self.resets)}


@dataclass(frozen=True)
class Limits:
    """The time limits of a job, in seconds: ``exit`` runs from a script's end to its process's, if all others wait or
    have ended, ``exit_of_all`` if none does; ``grace`` also from the chief's end to the first signal to the others.
    ``stall`` and ``stall_shutdown`` run from a wait's begin until it is shown, and until it ends the job; 0: never.
    ``verdict``: whether one is shown at the end.
    """

    start: float = 30.0
    run: float | None = None
    grace: float = 20.0
    exit: float = 300.0
    exit_of_all: float | None = None
    stall: float = 60.0
    stall_shutdown: float = 0.0
    verdict: bool = True


@dataclass(frozen=True)
class Ssh:
    """How to log in to remote hosts; ``command``: an argv instead of ssh, to which host and command are added."""

    port: int | None = None
    identity_file: str | None = None
    command: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """Returns the argv that logs in to a host, up to the host's name.

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
    """A command to run on every rank, and where; ``size`` counts the chief and the parameter servers, too.
    ``hosts``: empty: this machine, or those a scheduler has allocated. ``network_interfaces``: empty: all connected.
    ``elastic``: ``None``: all ranks end together. ``binding_args``: mpirun's, instead of choros' own binding.
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
    def fills_hosts(self) -> bool:
        """Whether mpirun fills one host after the other, as it does by default."""
        return not self.binding_args and not self.mpi_args

    @property
    def most(self) -> int:
        """The number of ranks that the job may have at a time."""
        return self.size if self.elastic is None else self.elastic.most

    def _requested(self) -> str:
        if not self.servers:
            return f"-np {self.size} requests more ranks"
        return f"--ps {self.servers} -np {self.roles.workers} requests more processes, {self.size} with the chief,"
