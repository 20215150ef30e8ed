"""The arguments of chorosrun and choros.run; after validation they become a job and its limits.

::

    chorosrun   click's options ──┐
                                  ├──► Arguments ──► Job, Limits
    choros.run  its signature ────┘
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from choros.errors import ConfigError
from choros.launch.plan.environment import allocated_slots
from choros.launch.plan.hosts import MOST_SLOTS, Host, parse_hostfile, parse_hosts, total_slots
from choros.launch.plan.job import Job, Ssh
from choros.launch.plan.limits import Limits
from choros.launch.protocol.wrapper_options import WrapperOptions

__all__ = ["Arguments"]

#: Variables in which Kubernetes' MPI operator and other tools pass a host file to mpirun.
_DEFAULT_HOSTFILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")
_RESTARTS = 3
_NUMBERS = (("num_proc", 1, MOST_SLOTS), ("ps", 1, MOST_SLOTS), ("max_restarts", 0, MOST_SLOTS), ("ssh_port", 1, 65535))
_TIMES = {"timeout": "more than 0", "start_timeout": "more than 0", "grace_period": "0 or more"}
_LIMITS = Limits()


@dataclass(frozen=True)
class Arguments:
    """The arguments, named as choros.run's and chorosrun's flags; ``chorosrun --help`` documents them.

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

    num_proc: int | None = None
    ps: int | None = None
    max_restarts: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: str | None = None
    hostfile: str | os.PathLike[str] | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_command: str | None = None
    network_interfaces: str = ""
    tcp: bool = False
    prefix_output: bool | None = None
    output_dir: str | os.PathLike[str] | None = None
    verbose: bool = False
    timeout: float | None = _LIMITS.run
    start_timeout: float = _LIMITS.start
    grace_period: float = _LIMITS.grace
    mpirun: str | None = None
    mpi_args: str = ""
    binding_args: str = ""
    in_python: bool = False

    def __post_init__(self) -> None:
        for name, least, most in _NUMBERS:
            number = getattr(self, name)
            if number is not None and not (type(number) is int and least <= number <= most):
                raise self._invalid(name, f"expected a whole number from {least} to {most}.")
        for name, bounds in _TIMES.items():
            seconds = getattr(self, name)
            if not (_is_finite(seconds) and (seconds > 0 or (seconds == 0 and name == "grace_period"))):
                if name == "timeout" and seconds is None:
                    continue
                raise self._invalid(name, f"expected a finite number of seconds, {bounds}.")
        if self.hosts is not None and self.hostfile is not None:
            both = f"{self._spelled('hosts')} and {self._spelled('hostfile')}"
            raise ConfigError(f"{both} both name hosts: give only one of them.")
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
        return Limits(self.start_timeout, self.timeout, self.grace_period)

    def prefix(self, size: int) -> bool:
        """Returns whether output lines are prefixed with the rank in a job of ``size`` ranks."""
        return size > 1 if self.prefix_output is None else self.prefix_output

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


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
