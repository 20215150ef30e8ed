"""How a rank has failed, what mpirun's own messages mean, and what an elastic job has lost, in words. Pure."""

import itertools
import re
import signal
from collections.abc import Iterable

from choros.errors import PREEMPTED, PeerLostError
from choros.launch.driver.job_end import JobEnd, Reason, signal_name
from choros.launch.plan.hosts import hosts_of_ranks
from choros.launch.plan.job import Job
from choros.launch.plan.restart import JobLoss
from choros.launch.plan.roles import Roles
from choros.launch.protocol.frames import Exit
from choros.settings import VARIABLES

_EXCEPTION = re.compile(r"^(?:  \| )?([A-Za-z_][\w.]*)(?::.*)?$")
_ADVICE: dict[int, str] = {
    signal.SIGKILL: "out of memory, or kill -9?",
    signal.SIGSEGV: "a bug in compiled code, or a library built for another machine?",
    signal.SIGBUS: "is shared memory (/dev/shm) full?",
    signal.SIGILL: "a library built for another processor?",
    signal.SIGABRT: "a library aborted; see its last messages.",
}


def headline(end: Exit, roles: Roles) -> str:
    """Returns how a rank has failed."""
    name = f"{roles.name(end.rank)} on {end.host}"
    if end.signal:
        advice = _ADVICE.get(end.signal, "")
        return f"{name} was killed by {signal_name(end.signal)} (signal {end.signal})" + (
            f": {advice}" if advice else ""
        )
    exception = exception_name(end.traceback or end.shown)
    return f"{name} failed with exit code {end.code}" + (f" ({exception})" if exception else "")


def exception_name(traceback: str) -> str:
    """Returns the name of the exception at the end of a traceback; empty if there is none.

    >>> exception_name("Traceback (most recent call last):\\n  File …\\nchoros.errors.MismatchError: no\\nmore")
    'MismatchError'
    """
    lines = traceback.splitlines()
    begin = max((i for i, line in enumerate(lines) if "Traceback (most recent call last):" in line), default=None)
    for line in lines[begin + 1 :] if begin is not None else ():
        match = _EXCEPTION.match(line)
        if match is not None:
            return match[1].rsplit(".", 1)[-1]
    return ""


#: A pattern in mpirun's messages → its meaning.
_KNOWN = {
    "not enough slots": "mpirun found fewer slots than ranks: name hosts with more slots with -H name:slots.",
    "MPI_ABORT was invoked": "A rank called MPI_Abort.",
    "MPI_ERRORS_ARE_FATAL": "MPI aborted because of an error.",
    "daemon|resolve|not known": (
        "mpirun's daemon on a host cannot be started or reached: check that `ssh HOST true` works without a prompt, "
        "or `srun hostname` in an allocation of SLURM, and that Python, choros and Open MPI are installed at the same "
        "paths on every host."
    ),
    "unable to find|could not find|No such file or directory": (
        "A host lacks a program: Python, choros and Open MPI must be installed at the same paths on every host."
    ),
}
_ABORTED = re.compile(r"\*\*\* reported by process \[\d+,(\d+)\]")
_LOST = re.compile(r"Remote host:\s*(\S+)|Remote daemon:.* on node (\S+)")


def explain(messages: Iterable[str]) -> str:
    """Returns the meaning of mpirun's messages, if it is known, followed by the messages themselves."""
    lines = [line for line in messages if line.strip(" -")]
    if not lines:
        return ""
    text = "\n".join(lines)
    known = next((meaning for pattern, meaning in _KNOWN.items() if re.search(pattern, text, re.IGNORECASE)), "")
    shown = "\n".join(f"  {line}" for line in lines[-30:])
    return f"{known} mpirun's messages:\n{shown}".lstrip()


def aborted_by_mpi(messages: Iterable[str]) -> frozenset[int]:
    """Returns the ranks that MPI ended because of an error, such as the loss of another rank.

    >>> aborted_by_mpi(["[a:00000] *** reported by process [917831681,2]"])
    frozenset({2})
    """
    return frozenset(int(rank) for line in messages for rank in _ABORTED.findall(line))


def lost_hosts(messages: Iterable[str]) -> frozenset[str]:
    """Returns the hosts that mpirun reports as lost.

    >>> lost_hosts(["  Remote host:   b"])
    frozenset({'b'})
    """
    found = (_LOST.search(line) for line in messages)
    return frozenset((match[1] or match[2]).rstrip(".,") for match in found if match is not None)


def met_shutdown(traceback: str) -> bool:
    """Returns whether a rank failed because it called a collective while another rank shut down.

    >>> met_shutdown("choros.errors.MismatchError: …\\n  rank 0: barrier()\\n  rank 1: shutdown()")
    True
    """
    return "MismatchError" in traceback and ": shutdown()" in traceback


#: What a rank says when it ends because of a silent host: see ``comm/other_hosts.py``.
_UNREACHABLE = re.compile(r"the host \S+ of ranks? ([\d, ]+) cannot be reached")

#: And because of slices of an optimizer's state that no rank has any more: see ``parallel/reduce/slices.py``.
_SLICE_LOST = re.compile(r"ranks (\d+) and (\d+) at the start of the job were both lost, and with them a slice")


def loss_of(job_end: JobEnd, job: Job) -> JobLoss | None:
    """Returns what the job has lost, without which it can be started again; ``None``: its outcome stands.
    That is if it ended by itself, was stopped, failed at its first start, or has fewer ranks left than ``--min-np``.
    """
    elastic, ends = job_end.elastic, list(job_end.exits.values())
    started = len(job_end.started) >= job_end.size and not job_end.unconnected
    if elastic is None or job_end.preempted:
        return None
    if job_end.reason not in (None, Reason.TOO_FEW, Reason.LOST, Reason.START_TIMEOUT) and not job_end.unconnected:
        return None
    failed = [end for end in job_end.failures if end.code not in (PREEMPTED, PeerLostError.exit_code)]
    owners = next(filter(None, map(_owners_of_lost_slice, job_end.failures)), None)
    if owners and started and job_end.size - len({end.rank for end in failed}) >= elastic.least:
        # The others have ended themselves; MPI ends a new rank that waits for them.
        what = _of(job_end, owners, "lost, and with them a slice of the optimizer's state and its copy")
        return JobLoss(what, started=started)
    if aborted_by_mpi(job_end.messages):
        return None
    if not started and VARIABLES["restarts"].name not in job.environment:
        return None
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
    return lost | (stopped | job_end.missing) - job_end.done


def _sentence(job_end: JobEnd, gone: frozenset[str], cut: set[tuple[str, str]], failed: list[Exit]) -> str:
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
    assigned = hosts_of_ranks(job.hosts, job.size) if job.fills_hosts else ()
    names: dict[str, str] = {}
    for start in job_end.started.values():
        is_first = start.rank < len(assigned) and not start.added
        names.setdefault(start.host, assigned[start.rank] if is_first else start.host)
    return names


def _owners_of_lost_slice(end: Exit) -> list[int]:
    said = _SLICE_LOST.search(_text_of(end))
    return sorted(map(int, said.groups())) if said is not None else []


def _text_of(end: Exit) -> str:
    return end.traceback or end.shown or end.tail


def _unreachable(end: Exit, job_end: JobEnd) -> set[str]:
    said = _UNREACHABLE.search(_text_of(end))
    ranks = [int(rank) for rank in said[1].split(",")] if said is not None else []
    return {job_end.started[rank].host for rank in ranks if rank in job_end.started}
