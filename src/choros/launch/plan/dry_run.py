"""What ``chorosrun --dry-run`` and ``--verbose`` print: the command, and what each rank gets. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from choros.launch.plan.command import Command
from choros.launch.plan.cores import share_of
from choros.launch.plan.hosts import ranks_per_host
from choros.launch.plan.job import Job
from choros.launch.plan.settings import rank_settings

__all__ = ["draft_text", "preparation"]


@dataclass(frozen=True)
class _Place:
    rank: int
    host: str
    local_rank: int
    local_size: int


def draft_text(job: Job, command: Command, environ: Mapping[str, str]) -> str:
    """The command, ready for a shell, and below it a comment for every rank.

    Args:
        job: what would run.
        command: the command that would run it.
        environ: the user's environment.
    """
    return "\n".join([str(command), *(f"# {line}" for line in preparation(job, environ))])


def preparation(job: Job, environ: Mapping[str, str]) -> list[str]:
    """A line for every rank: its host, its cores and what is added to its environment.

    Args:
        job: what runs.
        environ: the user's environment.
    """
    remote = {host.name for host in job.remote}
    lines = []
    for place in _places(job):
        settings = "its host's cores are shared out there"
        if place.host not in remote:
            share = share_of(place.local_rank, place.local_size, job.options.bind)
            cpus = ",".join(map(str, share.bind)) or "any"
            added = rank_settings({**environ, **job.environment}, share, one_host=not remote)
            words = [f"{name}={value}" for name, value in added.items()]
            settings = " ".join([f"cpus {cpus};", *words])
        lines.append(f"{job.roles.name(place.rank)} on {place.host}: {settings}")
    return lines


def _places(job: Job) -> list[_Place]:
    counts = ranks_per_host(job.hosts, job.size) or (job.size,)
    names = [host.name for host in job.hosts] or ["localhost"]
    pairs = [(name, local, count) for name, count in zip(names, counts, strict=False) for local in range(count)]
    return [_Place(rank, name, local, count) for rank, (name, local, count) in enumerate(pairs)]
