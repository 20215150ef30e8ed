"""Contenders: the libraries that are compared, and the commands with which their users start them, pure; nothing is set
that users would not have. What chorosrun sets is part of choros; ``mpi4py prepared`` and ``torch DDP prepared`` measure
how much that contributes.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from choros.errors import ConfigError
from choros.frameworks import is_installed
from choros.launch.driver.machine import detect_mpirun, version_of
from choros.launch.plan.cores import physical_cores
from choros.launch.plan.mpi_implementations import OPEN_MPI_4, OPEN_MPI_5
from choros.topology import TF_CONFIG, TFConfig
from choros.transport.address import free_ports

#: The name of choros' own contender: the baseline of all ratios.
CHOROS = "choros"
_LOCALHOST = "127.0.0.1"
_CONFINE = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
)

#: Python imports nothing from the current directory, which others may be able to write.
SAFE = {"PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class LaunchCommand:
    """One process to start: its argv, and the variables to add to its environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


#: Returns the commands, given the number of ranks and Python's arguments for the program (``-m module argument …``).
Starter = Callable[[int, Sequence[str]], list[LaunchCommand]]


@dataclass(frozen=True, eq=False)
class Contender:
    """A library, or a configuration of one, that is compared with the others: how its users ``start`` Python with
    ``argv``; modules that it ``needs``; ``single``: in one process, whatever the number of ranks, devices then.
    """

    name: str
    start: Starter
    argv: Sequence[str]
    needs: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    single: bool = False

    def check_installed(self) -> None:
        """Raises ``ContenderFailed`` if one of ``needs`` is missing. compat/horovod is not Horovod."""
        missing = [
            module for module in self.needs if not is_installed(module) or version_of(module).endswith("+choros")
        ]
        if missing:
            raise ContenderFailed(f"not installed ({', '.join(missing)})")


class ContenderFailed(RuntimeError):
    """A contender could not be started, or failed to run an order; the message gives the reason."""


def process(module: str, *arguments: str) -> list[str]:
    """Returns Python's arguments for a module below ``choros.bench.processes``."""
    return ["-m", f"choros.bench.processes.{module}", *arguments]


def check_names(only: Sequence[str], names: Sequence[str]) -> None:
    """Raises a ``ConfigError`` if a name in ``only`` is not among ``names``, the contenders'."""
    unknown = [name for name in only if name not in names]
    if unknown:
        known = ", ".join(map(repr, dict.fromkeys(names)))
        raise ConfigError(f"--only: unknown contender {unknown[0]!r}. Expected one of: {known}.")


def chosen(contenders: Sequence[Contender], only: Sequence[str]) -> tuple[Contender, ...]:
    """Returns choros and the contenders that ``only`` names; all contenders if ``only`` is empty."""
    return tuple(each for each in contenders if not only or each.name in (*only, CHOROS))


def chorosrun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun, as choros' users start a script.

    >>> (command,) = chorosrun(2, ["-m", "program"])
    >>> command.argv[1:]  # doctest: +ELLIPSIS
    ('-m', 'choros.launch.cli', '-np', '2', '--start-timeout', '120', ..., '-m', 'program')
    """
    return [LaunchCommand(_chorosrun(ranks, program))]


def elastic(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun with ``--min-np 1``: the ranks go on without those that are lost."""
    return [LaunchCommand(_chorosrun(ranks, program, "--min-np", "1"))]


def one_core(_ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun with one rank on one core: a rank's share when there are as many ranks as cores."""
    argv = _chorosrun(1, program)
    if hasattr(os, "sched_getaffinity"):
        core = physical_cores(sorted(os.sched_getaffinity(0)))[0]
        argv = (sys.executable, "-c", _CONFINE, ",".join(map(str, core)), *argv)
    return [LaunchCommand(argv)]


def _chorosrun(ranks: int, program: Sequence[str], *flags: str) -> tuple[str, ...]:
    argv = (sys.executable, "-m", "choros.launch.cli", "-np", str(ranks), "--start-timeout", "120", *flags)
    return (*argv, "--no-prefix-output", sys.executable, *program)


def mpirun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """``mpirun -np N`` with its defaults, plus the flags it requires for root or for more ranks than cores."""
    found = detect_mpirun()
    argv = [found.path]
    if found.implementation in (OPEN_MPI_4, OPEN_MPI_5):
        argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        argv += ["--oversubscribe"] if ranks > (os.cpu_count() or 1) else []
    return [LaunchCommand((*argv, "-np", str(ranks), sys.executable, *program), found.environment())]


def torchrun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """PyTorch's launcher, which gives each process one thread."""
    argv = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return [LaunchCommand((*argv, *program))]


def prepared_torch(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun for processes of ``torch.distributed``, which find each other at an address."""
    (port,) = free_ports(1)
    return [LaunchCommand(_chorosrun(ranks, program), {"MASTER_ADDR": _LOCALHOST, "MASTER_PORT": str(port)})]


def horovodrun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """Horovod's launcher."""
    return [LaunchCommand(("horovodrun", "-np", str(ranks), sys.executable, *program))]


def plain(program: Sequence[str], *environs: Mapping[str, str]) -> list[LaunchCommand]:
    """A process of Python for each of the ``environs``."""
    return [LaunchCommand((sys.executable, *program), environ) for environ in environs]


def logical_cpus(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process, whose last argument is the number of devices into which it divides the CPU."""
    return plain([*program, str(ranks)], {})


def xla_devices(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process in which XLA divides the CPU into ``ranks`` devices."""
    return plain(program, {"XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"})


def tf_cluster(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process for each rank, with the cluster in ``TF_CONFIG``."""
    cluster = {"worker": [f"{_LOCALHOST}:{port}" for port in free_ports(ranks)]}
    return plain(program, *({TF_CONFIG: TFConfig.of(cluster, "worker", rank).text()} for rank in range(ranks)))


def jax_cluster(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process for each rank, with the variables that ``keras.distribution.initialize`` reads."""
    (port,) = free_ports(1)
    prefix = "KERAS_DISTRIBUTION_"
    job = {f"{prefix}JOB_ADDRESSES": f"{_LOCALHOST}:{port}", f"{prefix}NUM_PROCESSES": str(ranks)}
    return plain(program, *({**job, f"{prefix}PROCESS_ID": str(rank)} for rank in range(ranks)))
