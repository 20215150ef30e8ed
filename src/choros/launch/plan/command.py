"""The mpirun command of a job: its argv and its environment. Values of variables are only in the environment.
``--dry-run`` and ``--verbose`` show it, with each rank's settings.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from choros.errors import ConfigError
from choros.launch.plan.cores import share_of
from choros.launch.plan.environment import for_srun, forwarded, in_allocation, rank_settings, without_launchers
from choros.launch.plan.hosts import hosts_of_ranks, ranks_per_host
from choros.launch.plan.job import Elastic, Job
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.protocol.wrapper_options import JOB, OWN_TEMPORARY
from choros.settings import VARIABLES

#: Python's arguments to run a rank's wrapper; see wrapper/__main__.py for the reasons.
_WRAPPER = ("-I", "-S", str(Path(__file__).parents[1] / "wrapper" / "__main__.py"))
#: NCCL and Gloo choose an interface themselves unless these are set.
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

#: Selects Open MPI's collectives. Ranks that join later choose others than those who were there before if han is one of
#: them, and the first collective of both hangs.
_COLLECTIVES, _WITHOUT_HAN = "OMPI_MCA_coll", "^han"

_OF_ELASTIC_JOBS = {
    *Elastic(least=1, most=1, resets=0).variables(),
    *(VARIABLES[name].name for name in ("spawn", "slots", "new_rank", "commit_dir", "commit_steps", "chaos")),
}


@dataclass(frozen=True)
class Command:
    """A command with its whole environment; ``gate``: directory of mpirun's gate key; empty: other hosts connect."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    one_host: bool = False
    gate: str = ""

    def __str__(self) -> str:
        return shlex.join(self.argv)


def plan(job: Job, mpirun: Mpirun, environ: Mapping[str, str], *, name: str, session: str, root: bool) -> Command:
    """Returns the command that runs ``job``; ``session`` is a directory on this host for mpirun's own files."""
    if job.elastic is not None and not mpirun.implementation.surviving:
        raise ConfigError(
            f"{mpirun.path} belongs to {mpirun.implementation.name}, whose ranks do not outlive each other: elastic "
            "jobs need Open MPI 5. The one that is installed with choros is used without --mpirun."
        )
    if job.remote and mpirun.implementation.mca and shlex.quote(mpirun.path) != mpirun.path:
        raise ConfigError(
            f"{mpirun.path!r} has characters that the shells of other hosts would split or execute, as its daemon is "
            "started there by this path: use a virtual environment at a path without spaces or quotes."
        )
    kept = without_launchers(environ)
    if JOB in environ:  # a rank of an elastic job may start one of its own, which is as its own arguments say
        kept = {variable: value for variable, value in kept.items() if variable not in _OF_ELASTIC_JOBS}
    full = {**kept, **for_srun(environ), **mpirun.environment(), **job.environment, JOB: name}
    if "TMPDIR" in job.environment:  # the ranks' own
        full.setdefault(OWN_TEMPORARY, str(Path(session).parent))
    if job.elastic is not None:
        full.setdefault(_COLLECTIVES, _WITHOUT_HAN)
        if job.hosts and job.fills_hosts:
            full[VARIABLES["slots"].name] = ",".join(hosts_of_ranks(job.hosts, job.most))
    interfaces = ",".join(job.network_interfaces)
    for variable in _INTERFACE_VARIABLES if interfaces and "/" not in interfaces else ():
        full.setdefault(variable, interfaces)
    one_host = not job.remote and (bool(job.hosts) or not in_allocation(environ))
    forward = [] if one_host else forwarded(full)
    listens = bool(mpirun.implementation.mca)  # for ranks and for daemons on other hosts, even if there are none
    gated = one_host and listens and sys.platform.startswith("linux")
    silence = VARIABLES["unreachable_seconds"].read(full)
    options, counts = replace(job.options, gated=gated), ranks_per_host(job.hosts, job.size)
    if job.fills_hosts and len(set(counts)) > 1:
        options = replace(options, ranks_per_host=counts)
    argv = [mpirun.path, *mpirun.implementation.arguments(job, session, root, forward, silence)]
    argv += [sys.executable, *_WRAPPER, str(options), *job.command]
    return Command(tuple(argv), full, one_host, gate=session if gated else "")


def dry_run_text(job: Job, command: Command, environ: Mapping[str, str]) -> str:
    """Returns the command, quoted for a shell, followed by a comment line for every rank."""
    return "\n".join([str(command), *(f"# {line}" for line in rank_lines(job, environ))])


def rank_lines(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Returns a line for every rank: its host, its cores and the variables added to its environment."""
    remote = {host.name for host in job.remote}
    counts = ranks_per_host(job.hosts, job.size) or (job.size,)
    names = [host.name for host in job.hosts] or ["localhost"]
    places = [(host, local, size) for host, size in zip(names, counts, strict=False) for local in range(size)]
    lines = []
    for rank, (host, local_rank, local_size) in enumerate(places):
        settings = "its wrapper divides the cores on that host"
        if host not in remote:
            share = share_of(local_rank, local_size, job.options.bind)
            cpus = ",".join(map(str, share.bind)) or "any"
            added = rank_settings({**environ, **job.environment}, share, one_host=not remote)
            variables = [f"{name}={value}" for name, value in added.items()]
            settings = " ".join([f"cpus {cpus};", *variables])
        lines.append(f"{job.roles.name(rank)} on {host}: {settings}")
    return lines
