"""The output of ``chorosrun --dry-run`` and ``--verbose``: the command and each rank's settings. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from choros.launch.plan.command import Command
from choros.launch.plan.cores import share_of
from choros.launch.plan.hosts import ranks_per_host
from choros.launch.plan.job import Job
from choros.launch.plan.settings import rank_settings

__all__ = ["dry_run_text", "rank_lines"]


@dataclass(frozen=True)
class _HostSlot:
    rank: int
    host: str
    local_rank: int
    local_size: int


def dry_run_text(job: Job, command: Command, environ: Mapping[str, str]) -> str:
    """Returns the command, quoted for a shell, followed by a comment line for every rank.

    Args:
        job: the job that would run.
        command: the command that would run it.
        environ: the user's environment.
    """
    return "\n".join([str(command), *(f"# {line}" for line in rank_lines(job, environ))])


def rank_lines(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Returns a line for every rank: its host, its cores and the variables added to its environment.

    Args:
        job: the job to describe.
        environ: the user's environment.
    """
    remote = {host.name for host in job.remote}
    lines = []
    for slot in _host_slots(job):
        settings = "its wrapper divides the cores on that host"
        if slot.host not in remote:
            share = share_of(slot.local_rank, slot.local_size, job.options.bind)
            cpus = ",".join(map(str, share.bind)) or "any"
            added = rank_settings({**environ, **job.environment}, share, one_host=not remote)
            variables = [f"{name}={value}" for name, value in added.items()]
            settings = " ".join([f"cpus {cpus};", *variables])
        lines.append(f"{job.roles.name(slot.rank)} on {slot.host}: {settings}")
    return lines


def _host_slots(job: Job) -> list[_HostSlot]:
    counts = ranks_per_host(job.hosts, job.size) or (job.size,)
    names = [host.name for host in job.hosts] or ["localhost"]
    pairs = [(name, local, count) for name, count in zip(names, counts, strict=False) for local in range(count)]
    return [_HostSlot(rank, name, local, count) for rank, (name, local, count) in enumerate(pairs)]
