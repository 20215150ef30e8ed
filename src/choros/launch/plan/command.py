"""The mpirun command of a job: its argv and its environment. Values of variables are only in the environment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from choros.config import SLOTS
from choros.errors import ConfigError
from choros.launch.plan.environment import for_srun, forwarded, in_allocation, without_launchers
from choros.launch.plan.hosts import hosts_of_ranks, ranks_per_host
from choros.launch.plan.job import Job
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.protocol.wrapper_options import JOB, WrapperOptions

__all__ = ["Command", "plan"]

#: Python's arguments to run a rank's wrapper; see wrapper/__main__.py for the reasons.
_WRAPPER = ("-I", "-S", str(Path(__file__).parents[1] / "wrapper" / "__main__.py"))
#: NCCL and Gloo choose an interface themselves unless these are set.
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

#: Selects Open MPI's collectives. Ranks that join later choose others than those who were there before if han is one of
#: them, and the first collective of both hangs.
_COLLECTIVES, _WITHOUT_HAN = "OMPI_MCA_coll", "^han"


@dataclass(frozen=True)
class Command:
    """A command to start.

    Attributes:
        argv: its arguments, the program first.
        environ: its complete environment.
        one_host: all ranks run on this host.
        gate: the directory for the key of the gate before an mpirun that listens; empty: other hosts connect to it.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    one_host: bool = False
    gate: str = ""

    def __str__(self) -> str:
        return shlex.join(self.argv)


def plan(job: Job, mpirun: Mpirun, environ: Mapping[str, str], *, name: str, session: str, root: bool) -> Command:
    """Returns the command that runs ``job``.

    Args:
        job: the job to run.
        mpirun: the mpirun that runs it.
        environ: the user's environment.
        name: the job's unique name.
        session: a directory on this host for mpirun's own files.
        root: whether this process runs as root.
    """
    if job.elastic is not None and not mpirun.implementation.surviving:
        raise ConfigError(
            f"{mpirun.path} belongs to {mpirun.implementation.name}, whose ranks do not outlive each other: elastic "
            "jobs need Open MPI 5. The one that is installed with choros is used without --mpirun."
        )
    full = {**without_launchers(environ), **for_srun(environ), **mpirun.environment(), **job.environment, JOB: name}
    if job.elastic is not None:
        full.setdefault(_COLLECTIVES, _WITHOUT_HAN)
        if job.hosts and _maps_by_default(job):
            full[SLOTS.name] = ",".join(hosts_of_ranks(job.hosts, job.most))
    interfaces = ",".join(job.network_interfaces)
    for variable in _INTERFACE_VARIABLES if interfaces and "/" not in interfaces else ():
        full.setdefault(variable, interfaces)
    one_host = not job.remote and (bool(job.hosts) or not in_allocation(environ))
    forward = [] if one_host else forwarded(full)
    gated = one_host and mpirun.implementation.listens and sys.platform.startswith("linux")
    argv = [mpirun.path, *mpirun.implementation.arguments(job, session, root, forward)]
    argv += [sys.executable, *_WRAPPER, *replace(_options(job), gated=gated).arguments(), "--", *job.command]
    return Command(tuple(argv), full, one_host, gate=session if gated else "")


def _options(job: Job) -> WrapperOptions:
    """Returns the wrappers' options, with the number of ranks of each host if the numbers differ."""
    counts = ranks_per_host(job.hosts, job.size)
    differ = len(set(counts)) > 1
    return replace(job.options, ranks_per_host=counts) if _maps_by_default(job) and differ else job.options


def _maps_by_default(job: Job) -> bool:
    """Whether mpirun fills one host after the other."""
    return not job.binding_args and not job.mpi_args
