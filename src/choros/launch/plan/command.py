"""A job becomes a command: the words, and the environment they run in. Values of variables are in the latter only."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from choros.launch.plan.environment import forwarded, in_allocation, without_launchers
from choros.launch.plan.hosts import ranks_per_host
from choros.launch.plan.job import Job
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.protocol.wrapper_options import JOB, Options

__all__ = ["Command", "plan"]

#: What Python is given to run a rank's wrapper; why so, it says itself.
_WRAPPER = ("-I", "-S", str(Path(__file__).parents[1] / "wrapper" / "__main__.py"))
#: NVIDIA's and Meta's libraries choose an interface themselves unless one is set.
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Command:
    """What to start.

    Attributes:
        words: the command line.
        environ: its environment, complete.
    """

    words: tuple[str, ...]
    environ: Mapping[str, str]

    def __str__(self) -> str:
        return shlex.join(self.words)


def plan(job: Job, mpirun: Mpirun, environ: Mapping[str, str], *, name: str, session: str, root: bool) -> Command:
    """The command that runs ``job``.

    Args:
        job: what to run.
        mpirun: what to run it with.
        environ: the user's environment.
        name: the job's name, unlike any other's.
        session: a directory of this host for mpirun's own files.
        root: whether we are root.
    """
    full = {**without_launchers(environ), **mpirun.environment(), **job.environment, JOB: name}
    interfaces = ",".join(job.network_interfaces)
    for variable in _INTERFACE_VARIABLES if interfaces and "/" not in interfaces else ():
        full.setdefault(variable, interfaces)
    elsewhere = bool(job.remote) or (not job.hosts and in_allocation(environ))
    forward = forwarded(full) if elsewhere else []
    words = [mpirun.path, *mpirun.flavour.arguments(job, session, root, forward)]
    words += [sys.executable, *_WRAPPER, *_options(job).words(), "--", *job.command]
    return Command(tuple(words), full)


def _options(job: Job) -> Options:
    """The wrappers' options, with the number of ranks on each host where hosts differ."""
    counts = ranks_per_host(job.hosts, job.size)
    ours = not job.binding_args and not job.mpi_args
    return replace(job.options, ranks_per_host=counts) if ours and len(set(counts)) > 1 else job.options
