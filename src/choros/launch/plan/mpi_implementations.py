"""The supported MPI implementations: the arguments and signals of each one's mpirun."""

from __future__ import annotations

import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from choros.errors import ConfigError
from choros.launch.plan.job import Job, Ssh
from choros.launch.protocol.wrapper_options import STACKS
from choros.observe import MOVE

__all__ = ["Hydra", "IntelMpi", "MpiImplementation", "Mpirun", "OpenMpi4", "OpenMpi5", "implementation_of"]


class MpiImplementation(ABC):
    """An MPI implementation's mpirun: its arguments and signals."""

    #: Its name, for messages.
    name: str
    #: Signal for the ranks, or ``STACKS``, for the wrappers → signal that this mpirun forwards to the wrappers for it.
    signal_map: ClassVar[Mapping[signal.Signals, signal.Signals]]
    #: The arguments with which ranks outlive others that are killed; empty if they cannot.
    surviving: ClassVar[tuple[str, ...]] = ()
    #: Whether this mpirun listens, for ranks and for its daemons on other hosts, even if the job runs on one.
    listens: ClassVar[bool] = False

    @abstractmethod
    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:
        """Returns the arguments between ``mpirun`` and the command.

        Args:
            job: the job to run.
            session: a directory on this host for mpirun's own files.
            root: whether this process runs as root, which Open MPI allows only with a flag.
            forward: names of environment variables to forward to other hosts.
        """


_OPEN_MPI_SIGNALS = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGINT: signal.SIGALRM,
    signal.SIGTERM: signal.SIGABRT,
    signal.SIGKILL: signal.SIGURG,
    STACKS: STACKS,
    MOVE: signal.SIGVTALRM,
}

#: Open MPI's daemons detect a lost connection when they have not been answered for three to four seconds; by default,
#: after eight minutes.
_KEEPALIVE = {"oob_tcp_keepalive_time": "1", "oob_tcp_keepalive_intvl": "1", "oob_tcp_keepalive_probes": "3"}
_HYDRA_SIGNALS = {signal.SIGUSR1: signal.SIGUSR1, signal.SIGINT: signal.SIGALRM, signal.SIGTERM: signal.SIGALRM}


@dataclass(frozen=True)
class _OpenMpiOptions:
    """The options of an Open MPI's runtime.

    Attributes:
        mapping: how to map and not bind ranks.
        mca: the flag of its parameters; those below follow it.
        directory: the parameter with the directory for its files.
        agent: the parameter with the command that reaches a host.
        interfaces: the parameter with the interfaces of its daemons.
        forwarding: what makes it forward the signals of ``_OPEN_MPI_SIGNALS``, if it does not by default.
    """

    mapping: tuple[str, ...]
    mca: str
    directory: str
    agent: str
    interfaces: str
    forwarding: tuple[str, ...] = ()

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:
        """See ``MpiImplementation.arguments``."""
        arguments = ["--allow-run-as-root"] if root else []
        arguments += job.binding_args or self.mapping
        arguments += [self.mca, self.directory, session, *self.forwarding]
        if job.remote:
            arguments += [self.mca, self.agent, " ".join(job.ssh.argv())]
            arguments += [text for name, value in _KEEPALIVE.items() for text in (self.mca, name, value)]
        if job.network_interfaces:
            interfaces = ",".join(job.network_interfaces)
            if job.remote or not all(map(_is_loopback, job.network_interfaces)):  # daemons refuse loopback alone
                arguments += [self.mca, self.interfaces, interfaces]
            arguments += ["--mca", "btl_tcp_if_include", interfaces]
        arguments += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"] if job.tcp else []
        arguments += ["-H", ",".join(map(str, job.hosts))] if job.hosts else []
        for name in forward:
            arguments += ["-x", name]
        return [*arguments, *job.mpi_args, "-np", str(job.size)]


def _is_loopback(interface: str) -> bool:
    return interface in ("lo", "lo0") or interface.startswith("127.")


class OpenMpi5(MpiImplementation):
    """Open MPI 5, whose runtime is PRRTE."""

    name = "Open MPI 5"
    signal_map = _OPEN_MPI_SIGNALS
    surviving = ("--with-ft", "ulfm")
    listens = True
    _options = _OpenMpiOptions(
        mapping=("--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
        mca="--prtemca",
        directory="prte_local_tmpdir_base",
        agent="plm_ssh_agent",
        interfaces="prte_if_include",
    )

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:
        """See ``MpiImplementation.arguments``."""
        surviving = self.surviving if job.elastic is not None else ()
        return [*surviving, *self._options.arguments(job, session, root, forward)]


class OpenMpi4(MpiImplementation):
    """Open MPI 4, whose runtime is ORTE."""

    name = "Open MPI 4"
    signal_map = _OPEN_MPI_SIGNALS
    listens = True
    _options = _OpenMpiOptions(
        mapping=("--bind-to", "none", "--map-by", "slot", "--oversubscribe"),
        mca="--mca",
        directory="orte_local_tmpdir_base",
        agent="plm_rsh_agent",
        interfaces="oob_tcp_if_include",
        forwarding=("--mca", "ess_base_forward_signals", "SIGALRM,SIGABRT,SIGURG,SIGUSR1,SIGUSR2,SIGPROF"),
    )

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:
        """See ``MpiImplementation.arguments``."""
        return self._options.arguments(job, session, root, forward)


class Hydra(MpiImplementation):
    """MPICH and its derivatives: MVAPICH, ParaStation.

    It forwards SIGUSR1 and SIGALRM, but not SIGUSR2, SIGABRT or SIGURG: so SIGINT and SIGTERM both reach the ranks as
    SIGINT, and mpirun ends the wrappers itself.
    """

    name = "MPICH"
    signal_map = _HYDRA_SIGNALS

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:  # noqa: ARG002
        """See ``MpiImplementation.arguments``."""
        return [*(job.binding_args or ["-bind-to", "none"]), *_hydra_arguments(job, forward)]


class IntelMpi(MpiImplementation):
    """Intel MPI: Hydra with other options."""

    name = "Intel MPI"
    signal_map = Hydra.signal_map

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:  # noqa: ARG002
        """See ``MpiImplementation.arguments``."""
        return [*(job.binding_args or ["-genv", "I_MPI_PIN", "0"]), *_hydra_arguments(job, forward)]


def _hydra_arguments(job: Job, forward: list[str]) -> list[str]:
    arguments = ["-hosts", ",".join(map(str, job.hosts))] if job.hosts else []
    if job.remote:
        if job.ssh.argv()[1:] not in ([], Ssh().argv()[1:]):
            raise ConfigError(
                f"{' '.join(job.ssh.argv())}: MPICH's and Intel's mpirun take a program for the login, without "
                "arguments. Put the port and the key in ~/.ssh/config, or give --ssh-command the path of a script."
            )
        arguments += ["-launcher", "ssh", "-launcher-exec", job.ssh.argv()[0]]
    if job.network_interfaces:
        arguments += ["-iface", job.network_interfaces[0]]
    if forward:
        arguments += ["-genvlist", ",".join(forward)]
    return [*arguments, *job.mpi_args, "-n", str(job.size)]


@dataclass(frozen=True)
class Mpirun:
    """An mpirun installed on this machine.

    Attributes:
        path: its path.
        implementation: the MPI implementation it belongs to.
        version: the first line that ``mpirun --version`` prints.
        libmpi: the path of its MPI library, unless it is the one installed beside this Python, which mpi4py loads by
            itself.
    """

    path: str
    implementation: MpiImplementation
    version: str
    libmpi: str | None = None

    def environment(self) -> dict[str, str]:
        """Returns the variables that make mpi4py load this MPI's library instead of the one installed beside it."""
        return {"MPI4PY_LIBMPI": self.libmpi} if self.libmpi is not None else {}


def implementation_of(version: str) -> MpiImplementation | None:
    """Returns the MPI implementation whose ``mpirun --version`` prints ``version``; ``None`` if it is unknown.

    Example:
        >>> implementation_of("mpirun (Open MPI) 5.0.11").name
        'Open MPI 5'
    """
    open_mpi = re.search(r"\((Open ?MPI|OpenRTE|PRRTE)\) (\d+)", version)
    if open_mpi is not None:
        return OpenMpi5() if open_mpi[1] == "PRRTE" or int(open_mpi[2]) >= 5 else OpenMpi4()
    if "Intel(R) MPI" in version:
        return IntelMpi()
    return Hydra() if "HYDRA" in version or "MPICH" in version else None
