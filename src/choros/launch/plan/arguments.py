"""The arguments of chorosrun and choros.run; after validation they become a job and its limits.

::

    chorosrun   options.py ◄── the flag of each field ──┐
                    │                                   │
                    ├──────────────────────────────► Arguments ──► Job, Limits
                    │
    choros.run  its signature
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from choros.config import MERGE_OUTPUT
from choros.errors import ConfigError
from choros.launch.plan.environment import allocated_slots
from choros.launch.plan.flags import FlagValue, Seconds, WholeNumber, flag, flag_of
from choros.launch.plan.hosts import MOST_SLOTS, Host, parse_hostfile, parse_hosts, total_slots
from choros.launch.plan.job import Job, Ssh
from choros.launch.plan.limits import Limits
from choros.launch.protocol.wrapper_options import WrapperOptions

__all__ = ["Arguments"]

#: Variables in which Kubernetes' MPI operator and other tools pass a host file to mpirun.
_DEFAULT_HOSTFILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")
_RESTARTS = 3
_RANKS = WholeNumber(1, MOST_SLOTS)
_LIMITS = Limits()


@dataclass(frozen=True)
class Arguments:
    """The arguments, named as choros.run's and chorosrun's flags; each has its flag.

    Attributes:
        in_python: error messages name choros.run's arguments instead of chorosrun's flags.

    Raises:
        ConfigError: a value is invalid.

    Example:
        >>> Arguments(start_timeout=float("nan"))
        Traceback (most recent call last):
        choros.errors.ConfigError: --start-timeout nan: expected a finite number of seconds, more than 0.
        >>> Arguments(num_proc=0, in_python=True)
        Traceback (most recent call last):
        choros.errors.ConfigError: np=0: expected a whole number from 1 to 1048576.
    """

    # fmt: off
    num_proc: int | None = flag(
        "Job", "-np", "--num-proc", metavar="N", bounds=_RANKS,
        help="Number of ranks, or of workers with --ps. Default: the number of slots of the hosts, or of a "
        "scheduler's allocation; without either, the number of accelerators of this machine, at least 1.")
    ps: int | None = flag(
        "Job", "--ps", metavar="P", bounds=_RANKS,
        help="Start a job for ParameterServerStrategy: a chief, P parameter servers and -np workers, each with its "
        "role in TF_CONFIG. The job ends when the chief ends, with the chief's exit code.")
    max_restarts: int | None = flag(
        "Job", "--max-restarts", metavar="N", bounds=WholeNumber(0, MOST_SLOTS),
        help="With --ps: how many times a worker that was killed by a signal is restarted. Default: 3.")
    env: Mapping[str, str] = flag(
        "Job", "--env", default_factory=dict, value=FlagValue.REPEATED, metavar="KEY[=VALUE]",
        help="Set an environment variable for the ranks; may be given more than once. Ranks on other hosts "
        "inherit this host's environment without it.")
    hosts: str | None = flag(
        "Hosts", "-H", "--hosts", metavar="HOST:SLOTS,...",
        help="The hosts, with the number of slots (ranks) of each.")
    hostfile: str | os.PathLike[str] | None = flag(
        "Hosts", "-hostfile", "--hostfile", value=FlagValue.FILE, metavar="FILE",
        help="A file of hosts, one line `host slots=N` for each.")
    ssh_port: int | None = flag(
        "Hosts", "-p", "--ssh-port", metavar="PORT", bounds=WholeNumber(1, 65535),
        help="The port of the hosts' ssh servers.")
    ssh_identity_file: str | None = flag(
        "Hosts", "-i", "--ssh-identity-file", metavar="FILE", help="The private key for ssh.")
    ssh_command: str | None = flag(
        "Hosts", "--ssh-command", metavar="PROGRAM",
        help="A program to use instead of ssh, with its arguments; it is called as PROGRAM HOST COMMAND...")
    network_interfaces: str = flag(
        "Hosts", "--network-interfaces", "--network-interface", default="", metavar="NAME,...",
        help="Communicate only through these interfaces: names that exist on every host, or networks such as "
        "10.0.0.0/24.")
    tcp: bool = flag(
        "Hosts", "--tcp", default=False, value=FlagValue.SWITCH,
        help="Communicate only through TCP, even if a faster network exists.")
    prefix_output: bool | None = flag(
        "Output", "--prefix-output/--no-prefix-output", value=FlagValue.SWITCH,
        help="Prefix every line with [rank], or [role] with --ps. Default: with more than one rank.")
    merge_output: bool | None = flag(
        "Output", "--merge-output/--no-merge-output", value=FlagValue.SWITCH,
        help="Show equal lines that several ranks write on standard error within a moment as one line with the prefix "
        "[0-3]. Default: with a prefix, unless CHOROS_MERGE_OUTPUT=0.")
    output_dir: str | os.PathLike[str] | None = flag(
        "Output", "--output-dir", "--output-filename", metavar="DIR",
        help="Also write each rank's output to DIR/rank.N/stdout and stderr on this machine; with --ps, to "
        "DIR/chief, DIR/ps.N and DIR/worker.N.")
    verbose: bool = flag(
        "Output", "--verbose", default=False, value=FlagValue.SWITCH,
        help="Show the mpirun command, each rank's settings and mpirun's messages.")
    timeout: float | None = flag(
        "Time", "--timeout", default=_LIMITS.run, metavar="SECONDS", bounds=Seconds(),
        help="Stop the job after this time.")
    start_timeout: float = flag(
        "Time", "--start-timeout", default=_LIMITS.start, metavar="SECONDS", bounds=Seconds(),
        environ=("CHOROS_START_TIMEOUT", "HOROVOD_START_TIMEOUT"),
        help="How long connecting to the hosts and starting the ranks may take.")
    grace_period: float = flag(
        "Time", "--grace-period", default=_LIMITS.grace, metavar="SECONDS", bounds=Seconds(or_zero=True),
        help="How long ranks may take to end after SIGINT or SIGTERM.")
    exit_timeout: float | None = flag(
        "Time", "--exit-timeout", default=_LIMITS.exit_of_all, metavar="SECONDS", bounds=Seconds(),
        help=f"How long ranks may take to end after their scripts. Default: {_LIMITS.exit:g} while all others wait or "
        "have ended; no limit while all ranks take their time.")
    mpirun: str | None = flag(
        "MPI", "--mpirun", metavar="PATH", help="The mpirun to use. Default: the one installed with choros.")
    mpi_args: str = flag(
        "MPI", "--mpi-args", default="", metavar="ARGUMENTS",
        help='Additional arguments for mpirun, in quotes: --mpi-args="..."')
    binding_args: str = flag(
        "MPI", "--binding-args", default="", metavar="ARGUMENTS",
        help="mpirun's arguments for binding and mapping, instead of choros' own binding to whole cores.")
    # fmt: on
    in_python: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            own = flag_of(each)
            value = getattr(self, each.name)
            optional = each.default is None and value is None
            if own is not None and own.bounds is not None and not optional and value not in own.bounds:
                raise self._invalid(each.name, f"expected {own.bounds}.")
        if self.hosts is not None and self.hostfile is not None:
            both = f"{self._spelled('hosts')} and {self._spelled('hostfile')}"
            raise ConfigError(f"{both} both name hosts: give only one of them.")
        if self.merge_output and self.prefix_output is False:
            raise self._invalid("merge_output", "lines are merged only if a prefix says which ranks wrote them.")
        if self.max_restarts is not None and not self.ps:
            raise ConfigError(
                "--max-restarts applies only to the workers of a job with parameter servers: add --ps, or leave it out."
            )
        if self.ssh_command is not None and (self.ssh_port, self.ssh_identity_file) != (None, None):
            raise self._invalid(
                "ssh_command",
                f"it replaces ssh, so {self._spelled('ssh_port')} and {self._spelled('ssh_identity_file')} have no "
                "effect: give them as its own arguments, such as 'ssh -p 2222 -i key'.",
            )
        for item in self.env.items():
            if not all(isinstance(text, str) for text in item):
                raise ConfigError(
                    f"env={dict([item])!r}: the name and the value of an environment variable must be strings."
                )

    def job(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        own_names: Callable[[], frozenset[str]],
        count_accelerators: Callable[[], int],
        options: WrapperOptions | None = None,
    ) -> Job:
        """Returns the job that runs ``command``.

        Args:
            command: the argv that every rank runs.
            environ: the user's environment, which may name a host file or an allocation of a scheduler.
            own_names: returns this machine's names; called if hosts are given.
            count_accelerators: returns this machine's number of accelerators; called if neither the number of ranks
                nor hosts are given.
            options: the wrappers' options, to which the arguments add theirs.

        Raises:
            ConfigError: hosts or arguments for mpirun are malformed, or there are fewer slots than ranks.
        """
        hosts = self._hosts(environ)
        servers = self.ps or 0
        names = own_names() if hosts else frozenset()
        restarts = (_RESTARTS if self.max_restarts is None else self.max_restarts) if servers else 0
        return Job(
            command=tuple(command),
            size=self._size(hosts, servers, environ, count_accelerators),
            hosts=hosts,
            remote=tuple(host for host in hosts if host.name not in names),
            environment=dict(self.env),
            ssh=Ssh(self.ssh_port, self.ssh_identity_file, self._split("ssh_command")),
            network_interfaces=tuple(part.strip() for part in self.network_interfaces.split(",") if part.strip()),
            tcp=self.tcp,
            mpi_args=self._split("mpi_args"),
            binding_args=self._split("binding_args"),
            options=replace(options or WrapperOptions(), bind=not self.binding_args, restarts=restarts),
            servers=servers,
        )

    @property
    def limits(self) -> Limits:
        """The time limits."""
        exit_timeout = _LIMITS.exit if self.exit_timeout is None else self.exit_timeout
        return Limits(self.start_timeout, self.timeout, self.grace_period, exit_timeout, self.exit_timeout)

    def prefix(self, size: int) -> bool:
        """Returns whether output lines are prefixed with the rank in a job of ``size`` ranks."""
        return size > 1 if self.prefix_output is None else self.prefix_output

    def merge(self, size: int, environ: Mapping[str, str]) -> bool:
        """Returns whether equal lines of the ``size`` ranks are merged."""
        wanted = MERGE_OUTPUT.read(environ) == "1" if self.merge_output is None else self.merge_output
        return wanted and size > 1 and self.prefix(size)

    def _size(
        self, hosts: Sequence[Host], servers: int, environ: Mapping[str, str], count_accelerators: Callable[[], int]
    ) -> int:
        """Returns the number of processes.

        As requested; or the slots of the hosts that are given or that a scheduler has allocated; or one for each
        accelerator; or one.
        """
        if self.num_proc is None:
            slots = total_slots(hosts) or allocated_slots(environ) or 0
            if hosts or slots > 1:
                return slots
        return (self.num_proc or count_accelerators() or 1) + (1 + servers if servers else 0)

    def _hosts(self, environ: Mapping[str, str]) -> tuple[Host, ...]:
        if self.hosts is not None:
            return parse_hosts(self.hosts)
        hostfile = self.hostfile
        if hostfile is None:
            hostfile = next((environ[name] for name in _DEFAULT_HOSTFILES if environ.get(name)), None)
        return parse_hostfile(Path(hostfile)) if hostfile is not None else ()

    def _split(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(shlex.split(getattr(self, name) or ""))
        except ValueError as error:
            raise self._invalid(
                name, f"it cannot be split into arguments ({error}). Close every quotation mark."
            ) from error

    def _invalid(self, name: str, expected: str) -> ConfigError:
        value = getattr(self, name)
        spelled = self._spelled(name)
        return ConfigError(f"{spelled}={value!r}: {expected}" if self.in_python else f"{spelled} {value}: {expected}")

    def _spelled(self, name: str) -> str:
        if self.in_python:
            return "np" if name == "num_proc" else name
        return "-np" if name == "num_proc" else f"--{name.replace('_', '-')}"
