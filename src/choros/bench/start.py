"""The commands with which the users of each peer start it, as pure functions.

Nothing is set that a user of the peer would not have: raw MPI has its mpirun's binding, torchrun gives each process
one thread, TensorFlow in one process has all cores. chorosrun's settings for a rank are part of choros;
``mpi4py prepared`` and ``torch DDP prepared`` measure how much they contribute to its speed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from choros.launch.driver.mpirun_detection import detect_mpirun
from choros.launch.plan.cores import physical_cores
from choros.launch.plan.mpi_implementations import OpenMpi4, OpenMpi5

__all__ = [
    "LaunchCommand", "Starter", "chorosrun", "elastic", "horovodrun", "jax_cluster", "logical_cpus", "mpirun",
    "one_core", "prepared_torch", "tf_cluster", "torchrun", "xla_devices",
]  # fmt: skip

_LOCALHOST = "127.0.0.1"
_CONFINE = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True)
class LaunchCommand:
    """One process to start: its argv, and the variables to add to its environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


#: Returns the commands, given the number of ranks and Python's arguments for the program (``-m module argument …``).
Starter = Callable[[int, Sequence[str]], list[LaunchCommand]]


def chorosrun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun, as choros' users start a script.

    Example:
        >>> (command,) = chorosrun(2, ["-m", "program"])
        >>> command.argv[1:]  # doctest: +ELLIPSIS
        ('-m', 'choros.launch.cli', '-np', '2', '--start-timeout', '120', ..., '-m', 'program')
    """
    argv = (sys.executable, "-m", "choros.launch.cli", "-np", str(ranks), "--start-timeout", "120")
    return [LaunchCommand((*argv, "--no-prefix-output", sys.executable, *program))]


def elastic(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun with ``--min-np 1``: the ranks go on without those that are lost."""
    (command,) = chorosrun(ranks, program)
    at = command.argv.index("-np")
    return [LaunchCommand((*command.argv[:at], "--min-np", "1", *command.argv[at:]), command.environ)]


def one_core(_ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun with one rank on one core: a rank's share when there are as many ranks as cores."""
    (command,) = chorosrun(1, program)
    if not hasattr(os, "sched_getaffinity"):
        return [command]
    core = physical_cores(sorted(os.sched_getaffinity(0)))[0]
    return [LaunchCommand((sys.executable, "-c", _CONFINE, ",".join(map(str, core)), *command.argv), command.environ)]


def mpirun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """``mpirun -np N`` with its defaults, plus the flags it requires for root or for more ranks than cores."""
    found = detect_mpirun()
    argv = [found.path]
    if isinstance(found.implementation, (OpenMpi4, OpenMpi5)):
        argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        argv += ["--oversubscribe"] if ranks > (os.cpu_count() or 1) else []
    return [LaunchCommand((*argv, "-np", str(ranks), sys.executable, *program), found.environment())]


def torchrun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """PyTorch's launcher, which gives each process one thread."""
    argv = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return [LaunchCommand((*argv, *program))]


def prepared_torch(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """chorosrun for processes of ``torch.distributed``, which find each other at an address."""
    (command,) = chorosrun(ranks, program)
    (port,) = _free_ports(1)
    return [LaunchCommand(command.argv, {"MASTER_ADDR": _LOCALHOST, "MASTER_PORT": str(port)})]


def horovodrun(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """Horovod's launcher."""
    return [LaunchCommand(("horovodrun", "-np", str(ranks), sys.executable, *program))]


def logical_cpus(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process, whose last argument is the number of devices into which it divides the CPU."""
    return [LaunchCommand((sys.executable, *program, str(ranks)))]


def xla_devices(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process in which XLA divides the CPU into ``ranks`` devices."""
    return [LaunchCommand((sys.executable, *program), {"XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"})]


def tf_cluster(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process for each rank, with the cluster in ``TF_CONFIG``."""
    return _tf_cluster_at(_free_ports(ranks), program)


def _tf_cluster_at(ports: Sequence[int], program: Sequence[str]) -> list[LaunchCommand]:
    """Returns the processes of a cluster on these ports.

    Example:
        >>> _tf_cluster_at([1, 2], ["-m", "program"])[1].environ["TF_CONFIG"]
        '{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}'
    """
    cluster = {"worker": [f"{_LOCALHOST}:{port}" for port in ports]}
    return [
        LaunchCommand(
            (sys.executable, *program),
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})},
        )
        for index in range(len(ports))
    ]


def jax_cluster(ranks: int, program: Sequence[str]) -> list[LaunchCommand]:
    """One process for each rank, with the variables that ``keras.distribution.initialize`` reads."""
    (port,) = _free_ports(1)
    return [
        LaunchCommand(
            (sys.executable, *program),
            {
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{_LOCALHOST}:{port}",
                "KERAS_DISTRIBUTION_NUM_PROCESSES": str(ranks),
                "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
            },
        )
        for rank in range(ranks)
    ]


def _free_ports(count: int) -> list[int]:
    """Returns ports of this machine on which no process listens."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_LOCALHOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
