"""What an elastic job has lost when it could not go on in place: mpirun, a host, or a link between hosts. Pure."""

import itertools
import re

from choros.errors import PREEMPTED, PeerLostError
from choros.launch.driver.failures import aborted_by_mpi, lost_hosts
from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.plan.hosts import hosts_of_ranks
from choros.launch.plan.job import Job
from choros.launch.plan.restart import JobLoss
from choros.launch.protocol.frames import Exit
from choros.settings import VARIABLES

#: What a rank says when it ends because of a silent host: see ``comm/other_hosts.py``.
_UNREACHABLE = re.compile(r"the host \S+ of ranks? ([\d, ]+) cannot be reached")


def loss_of(job_end: JobEnd, job: Job) -> JobLoss | None:
    """Returns what the job has lost, without which it can be started again; ``None``: its outcome stands.
    That is if it ended by itself, was stopped, failed at its first start, or has fewer ranks left than ``--min-np``.
    """
    elastic, ends = job_end.elastic, list(job_end.exits.values())
    started = len(job_end.started) >= job_end.size and not job_end.unconnected
    if elastic is None or job_end.preempted or aborted_by_mpi(job_end.messages):
        return None
    if job_end.reason not in (None, Reason.TOO_FEW, Reason.LOST, Reason.START_TIMEOUT) and not job_end.unconnected:
        return None
    if not started and VARIABLES["restarts"].name not in job.environment:
        return None
    failed = [end for end in ends if end.code not in (0, PREEMPTED, PeerLostError.exit_code) and not end.stopped]
    if len(job_end.members) - len(failed) < elastic.least:
        return None
    gone = lost_hosts(job_end.messages)
    killed = job_end.reason is None and bool(job_end.lost_mpirun)
    is_certain = bool(gone) or killed or job_end.reason is not None
    if not _interrupted(job_end) or (not is_certain and any(end.code == 0 for end in ends)):
        return None
    names = _names(job_end, job)
    cut = {(names[end.host], names[host]) for end in ends for host in _unreachable(end, job_end)}
    if job_end.unconnected:
        cut = set(itertools.combinations(sorted(set(names.values())), 2))
    hosts = frozenset(names.get(host, host) for host in gone)
    return JobLoss(_sentence(job_end, gone, cut, failed), hosts, frozenset(cut), started)


def _interrupted(job_end: JobEnd) -> set[int]:
    """The ranks that have not ended by themselves, nor failed; on one host, those of too few are not among them."""
    lost = {
        rank for rank, end in job_end.exits.items() if len(job_end.hosts) > 1 and end.code == PeerLostError.exit_code
    }
    stopped = {rank for rank, end in job_end.exits.items() if end.stopped}
    return lost | (stopped | (job_end.missing)) - job_end.done


def _sentence(job_end: JobEnd, gone: frozenset[str], cut: set[tuple[str, str]], failed: list[Exit]) -> str:
    """What was lost; the most certain reason."""
    missing = sorted(job_end.missing)
    on_lost_hosts = [rank for rank in missing if rank in job_end.started and job_end.started[rank].host in gone]
    if on_lost_hosts:
        return _of(job_end, on_lost_hosts, "lost: the host went down or can no longer be reached")
    if cut:
        return f"the hosts {', '.join(sorted({host for pair in cut for host in pair}))} have lost each other"
    if job_end.reason is None and job_end.lost_mpirun:
        return job_end.lost_mpirun
    if not missing and failed:
        return _of(job_end, sorted(end.rank for end in failed), "lost, and not more than half of all are left")
    if any(rank not in job_end.started for rank in missing):
        return f"{job_end.roles.names([rank for rank in missing if rank not in job_end.started])} could not be started"
    return _of(job_end, missing, "lost") if missing else "mpirun ended the job"


def _of(job_end: JobEnd, ranks: list[int], what: str) -> str:
    hosts = ", ".join(sorted({job_end.started[rank].host for rank in ranks}))
    return f"{job_end.roles.names(ranks)} on {hosts} {'was' if len(ranks) == 1 else 'were'} {what}"


def _names(job_end: JobEnd, job: Job) -> dict[str, str]:
    """By the name under which a host reports itself, that in the list of hosts."""
    assigned = () if job.binding_args or job.mpi_args else hosts_of_ranks(job.hosts, job.size)
    names: dict[str, str] = {}
    for start in job_end.started.values():
        is_first = start.rank < len(assigned) and not start.added
        names.setdefault(start.host, assigned[start.rank] if is_first else start.host)
    return names


def _unreachable(end: Exit, job_end: JobEnd) -> set[str]:
    """The hosts that a rank could not reach."""
    said = _UNREACHABLE.search(end.traceback or end.shown or end.tail)
    ranks = [int(rank) for rank in said[1].split(",")] if said is not None else []
    return {job_end.started[rank].host for rank in ranks if rank in job_end.started}
