"""The supported MPI implementations: the arguments and signals of each one's mpirun."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from choros.errors import ConfigError
from choros.launch.plan.job import Job, Ssh
from choros.launch.protocol.wrapper_options import SIGNAL_MEANINGS, STACKS

_OPEN_MPI_SIGNALS = {STACKS: STACKS, **{meaning: sent for sent, meaning in SIGNAL_MEANINGS.items()}}
#: MPICH and its derivatives, MVAPICH and ParaStation, forward neither SIGUSR2, SIGABRT nor SIGURG, only SIGUSR1 and
#: SIGALRM: so SIGINT and SIGTERM both reach the ranks as SIGINT, and mpirun ends the wrappers itself.
_HYDRA_SIGNALS = {signal.SIGUSR1: signal.SIGUSR1, signal.SIGINT: signal.SIGALRM, signal.SIGTERM: signal.SIGALRM}
#: Open MPI's daemons ask a silent host each second; by default, they notice a lost connection after eight minutes.
_KEEPALIVE = {"oob_tcp_keepalive_time": "1", "oob_tcp_keepalive_intvl": "1"}
_FEWEST_QUESTIONS = 3


@dataclass(frozen=True)
class MpiImplementation:
    """An MPI implementation's mpirun: the arguments that map ranks without binding them, and its signals.
    ``signal_map``: signal for the ranks, or ``STACKS``, for the wrappers → signal that mpirun forwards for it.
    ``mca``: the flag of the runtime's parameters, of Open MPI alone, and their names: ``directory``, ``agent``,
    ``interfaces``. ``surviving``: arguments with which ranks outlive others that are killed; empty if they cannot.
    """

    name: str
    mapping: tuple[str, ...]
    signal_map: Mapping[signal.Signals, signal.Signals]
    mca: str = ""
    directory: str = ""
    agent: str = ""
    interfaces: str = ""
    forwarding: tuple[str, ...] = ()
    surviving: tuple[str, ...] = ()

    def arguments(self, job: Job, session: str, root: bool, forward: list[str], silence: float) -> list[str]:
        """Returns the arguments between ``mpirun`` and the command; ``session``: directory for mpirun's own files;
        ``silence``: the seconds without an answer after which a host counts as lost."""
        mapping = job.binding_args or self.mapping
        if not self.mca:
            return [*mapping, *_hydra_arguments(job, forward)]
        arguments = [*self.surviving] if job.elastic is not None else []
        arguments += ["--allow-run-as-root"] if root else []
        arguments += [*mapping, self.mca, self.directory, session, *self.forwarding]
        if job.remote:
            if re.search(r'["$`\\\n]', session):  # mpirun puts it between double quotes
                raise ConfigError(
                    f"{session!r} has characters that the shells of other hosts would execute: set TMPDIR to a "
                    "directory without them."
                )
            arguments += [self.mca, self.agent, _unquoted(job.ssh.argv())]
            # From 65 hosts on, daemons would start others; but they get no more of the login than what precedes a "=",
            # and it may work on this host alone.
            arguments += [self.mca, self.agent.replace("agent", "no_tree_spawn"), "1"]
            asking = {**_KEEPALIVE, "oob_tcp_keepalive_probes": str(max(_FEWEST_QUESTIONS, round(silence)))}
            arguments += [text for name, value in asking.items() for text in (self.mca, name, value)]
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


#: Its runtime is PRRTE.
OPEN_MPI_5 = MpiImplementation(
    "Open MPI 5",
    ("--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
    _OPEN_MPI_SIGNALS,
    mca="--prtemca",
    directory="prte_local_tmpdir_base",
    agent="plm_ssh_agent",
    interfaces="prte_if_include",
    surviving=("--with-ft", "ulfm"),
)
#: Its runtime is ORTE.
OPEN_MPI_4 = MpiImplementation(
    "Open MPI 4",
    ("--bind-to", "none", "--map-by", "slot", "--oversubscribe"),
    _OPEN_MPI_SIGNALS,
    mca="--mca",
    directory="orte_local_tmpdir_base",
    agent="plm_rsh_agent",
    interfaces="oob_tcp_if_include",
    forwarding=("--mca", "ess_base_forward_signals", "SIGALRM,SIGABRT,SIGURG,SIGUSR1,SIGUSR2,SIGPROF"),
)
MPICH = MpiImplementation("MPICH", ("-bind-to", "none"), _HYDRA_SIGNALS)
INTEL_MPI = MpiImplementation("Intel MPI", ("-genv", "I_MPI_PIN", "0"), _HYDRA_SIGNALS)


def _unquoted(login: Sequence[str]) -> str:
    """The login's command as mpirun takes it, which splits it at each space: what follows one would be the host."""
    for each in login:
        if not each or re.search(r"\s", each):
            raise ConfigError(
                f"{each!r}: mpirun takes a program and arguments for the login that have no spaces. Make a link "
                "without one to the file, put the key in ~/.ssh/config, or give --ssh-command the path of a script."
            )
    return " ".join(login)


def _is_loopback(interface: str) -> bool:
    return interface in ("lo", "lo0") or interface.startswith("127.")


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
    """An mpirun of this machine; ``libmpi`` is unset if its library is beside this Python, where mpi4py finds it."""

    path: str
    implementation: MpiImplementation
    version: str
    libmpi: str | None = None

    def environment(self) -> dict[str, str]:
        """Returns the variables that make mpi4py load this MPI's library instead of the one installed beside it."""
        return {"MPI4PY_LIBMPI": self.libmpi} if self.libmpi is not None else {}


def implementation_of(version: str) -> MpiImplementation | None:
    """Returns the MPI implementation whose ``mpirun --version`` prints ``version``; ``None`` if it is unknown.

    >>> implementation_of("mpirun (Open MPI) 5.0.11").name
    'Open MPI 5'
    """
    open_mpi = re.search(r"\((Open ?MPI|OpenRTE|PRRTE)\) (\d+)", version)
    if open_mpi is not None:
        return OPEN_MPI_5 if open_mpi[1] == "PRRTE" or int(open_mpi[2]) >= 5 else OPEN_MPI_4
    if "Intel(R) MPI" in version:
        return INTEL_MPI
    return MPICH if "HYDRA" in version or "MPICH" in version else None
