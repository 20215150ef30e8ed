"""The kinds of mpirun choros knows, and what each calls the same things."""

from __future__ import annotations

import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from choros.launch.plan.job import Job

__all__ = ["Flavour", "Hydra", "IntelMpi", "Mpirun", "OpenMpi4", "OpenMpi5", "flavour_of"]


class Flavour(ABC):
    """How to say to one kind of mpirun what every kind can do."""

    #: Its name, for people.
    name: str
    #: Which signal to send mpirun so that the worker wrappers get the meaning on the left.
    carriers: ClassVar[Mapping[signal.Signals, signal.Signals]]

    @abstractmethod
    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:
        """The words between ``mpirun`` and the command.

        Args:
            job: what to run.
            session: a directory of this host for mpirun's own files.
            root: whether we are root, which Open MPI wants to have confirmed.
            forward: names of environment variables to set on other hosts as they are here.
        """


_ALL_CARRIERS = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGINT: signal.SIGALRM,
    signal.SIGTERM: signal.SIGABRT,
    signal.SIGKILL: signal.SIGURG,
}

#: Open MPI's daemons miss each other after half a minute; they would take eight.
_KEEPALIVE = {"oob_tcp_keepalive_time": "10", "oob_tcp_keepalive_intvl": "5", "oob_tcp_keepalive_probes": "4"}
_HYDRA_CARRIERS = {signal.SIGUSR1: signal.SIGUSR1, signal.SIGINT: signal.SIGALRM, signal.SIGTERM: signal.SIGALRM}


class OpenMpi5(Flavour):
    """Open MPI 5, whose runtime is PRRTE."""

    name = "Open MPI 5"
    carriers = _ALL_CARRIERS

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:
        """See ``Flavour.arguments``."""
        words = ["--allow-run-as-root"] if root else []
        words += job.binding_args or ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
        words += ["--prtemca", "prte_local_tmpdir_base", session]
        if job.remote:
            words += ["--prtemca", "plm_ssh_agent", " ".join(job.ssh.words())]
            words += [word for name, value in _KEEPALIVE.items() for word in ("--prtemca", name, value)]
        if job.network_interfaces:
            interfaces = ",".join(job.network_interfaces)
            words += ["--prtemca", "prte_if_include", interfaces, "--mca", "btl_tcp_if_include", interfaces]
        words += _open_mpi_words(job, forward)
        return words


class OpenMpi4(Flavour):
    """Open MPI 4, whose runtime is ORTE."""

    name = "Open MPI 4"
    carriers = _ALL_CARRIERS

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:
        """See ``Flavour.arguments``."""
        words = ["--allow-run-as-root"] if root else []
        words += job.binding_args or ["--bind-to", "none", "--map-by", "slot", "--oversubscribe"]
        words += ["--mca", "orte_local_tmpdir_base", session]
        words += ["--mca", "ess_base_forward_signals", "SIGALRM,SIGABRT,SIGURG,SIGUSR1,SIGUSR2"]
        if job.remote:
            words += ["--mca", "plm_rsh_agent", " ".join(job.ssh.words())]
            words += [word for name, value in _KEEPALIVE.items() for word in ("--mca", name, value)]
        if job.network_interfaces:
            interfaces = ",".join(job.network_interfaces)
            words += ["--mca", "oob_tcp_if_include", interfaces, "--mca", "btl_tcp_if_include", interfaces]
        words += _open_mpi_words(job, forward)
        return words


def _open_mpi_words(job: Job, forward: list[str]) -> list[str]:
    words = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"] if job.tcp else []
    words += ["-H", ",".join(map(str, job.hosts))] if job.hosts else []
    for name in forward:
        words += ["-x", name]
    return [*words, *job.mpi_args, "-np", str(job.size)]


class Hydra(Flavour):
    """MPICH, and what descends from it: MVAPICH, ParaStation.

    It passes on SIGUSR1 and SIGALRM, but not SIGUSR2, SIGABRT or SIGURG: so both ways to end a job politely
    reach the ranks as SIGINT, and it ends the wrappers itself.
    """

    name = "MPICH"
    carriers = _HYDRA_CARRIERS

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:  # noqa: ARG002
        """See ``Flavour.arguments``."""
        return [*(job.binding_args or ["-bind-to", "none"]), *_hydra_words(job, forward)]


class IntelMpi(Flavour):
    """Intel MPI: Hydra with other options."""

    name = "Intel MPI"
    carriers = Hydra.carriers

    def arguments(self, job: Job, session: str, root: bool, forward: list[str]) -> list[str]:  # noqa: ARG002
        """See ``Flavour.arguments``."""
        return [*(job.binding_args or ["-genv", "I_MPI_PIN", "0"]), *_hydra_words(job, forward)]


def _hydra_words(job: Job, forward: list[str]) -> list[str]:
    words = ["-hosts", ",".join(map(str, job.hosts))] if job.hosts else []
    if job.remote:
        words += ["-launcher", "ssh", "-launcher-exec", job.ssh.words()[0]]
    if job.network_interfaces:
        words += ["-iface", job.network_interfaces[0]]
    if forward:
        words += ["-genvlist", ",".join(forward)]
    return [*words, *job.mpi_args, "-n", str(job.size)]


@dataclass(frozen=True)
class Mpirun:
    """An mpirun of this machine.

    Attributes:
        path: where it is.
        flavour: its kind.
        version: what it says of itself.
        library: its MPI library, if it is not the one installed beside this Python, which mpi4py loads by itself.
    """

    path: str
    flavour: Flavour
    version: str
    library: str | None = None

    def environment(self) -> dict[str, str]:
        """What makes mpi4py load this MPI's library rather than the one installed beside it."""
        return {"MPI4PY_LIBMPI": self.library} if self.library is not None else {}


def flavour_of(version: str) -> Flavour | None:
    """The kind of mpirun that prints ``version`` when asked for it.

    Example:
        >>> flavour_of("mpirun (Open MPI) 5.0.11").name
        'Open MPI 5'
    """
    open_mpi = re.search(r"\((Open ?MPI|OpenRTE|PRRTE)\) (\d+)", version)
    if open_mpi is not None:
        return OpenMpi5() if open_mpi[1] == "PRRTE" or int(open_mpi[2]) >= 5 else OpenMpi4()
    if "Intel(R) MPI" in version:
        return IntelMpi()
    return Hydra() if "HYDRA" in version or "MPICH" in version else None
