"""The outcome of a job: messages and an exit code, computed from how its ranks ended; and what it has lost. Pure."""

import itertools
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from choros.errors import PREEMPTED, LaunchError, PeerLostError
from choros.launch.driver.job_end import JobEnd, Reason, signal_name
from choros.launch.plan.hosts import hosts_of_ranks
from choros.launch.plan.job import Elastic, Job, Limits
from choros.launch.plan.restart import JobLoss
from choros.launch.plan.roles import CHIEF, PS, WORKER, Roles
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

#: And because of one that was lost while MPI connected ranks: see ``comm/engines/mpi.py``, and ``mpi_admission.py``.
_LOST_IN_INIT = "before all had left init()"
_NOT_SURVIVED = re.compile(rf"a rank was lost ({re.escape(_LOST_IN_INIT)}|while MPI connected a new one)")


def loss_of(job_end: JobEnd, job: Job) -> JobLoss | None:
    """Returns what the job has lost, without which it can be started again; ``None``: its outcome stands.
    That is if it ended by itself, whatever became of ranks before that, was stopped, failed at its first start, or has
    fewer ranks left than ``--min-np``.
    """
    elastic, ends = job_end.elastic, list(job_end.exits.values())
    has_started = len(job_end.started) >= job_end.size and not job_end.unconnected
    started = has_started and _not_survived(job_end) != _LOST_IN_INIT
    has_finished = any(end.code == 0 and not end.stopped and end.rank in job_end.together for end in ends)
    if elastic is None or job_end.preempted or has_finished:
        return None
    if job_end.reason not in (None, Reason.TOO_FEW, Reason.LOST, Reason.START_TIMEOUT) and not job_end.unconnected:
        return None
    failed = [end for end in job_end.failures if end.code not in (PREEMPTED, PeerLostError.exit_code)]
    owners = next(filter(None, (_ranks_in(_SLICE_LOST, end) for end in job_end.failures)), None)
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
    is_certain = bool(gone) or killed or job_end.reason is not None or bool(_not_survived(job_end))
    if not _interrupted(job_end) or (not is_certain and any(end.code == 0 for end in ends)):
        return None
    names = _names(job_end, job)
    unreachable = [(end, rank) for end in ends for rank in _ranks_in(_UNREACHABLE, end) if rank in job_end.started]
    cut = {(names[end.host], names[job_end.started[rank].host]) for end, rank in unreachable}
    if job_end.unconnected:
        cut = set(itertools.combinations(sorted(set(names.values())), 2))
    hosts = frozenset(names.get(host, host) for host in gone)
    return JobLoss(_sentence(job_end, gone, cut, failed), hosts, frozenset(cut), started)


def _interrupted(job_end: JobEnd) -> set[int]:
    """The ranks that have not ended by themselves, nor failed; on one host, those of too few are not among them, nor
    are new ones that the others have not taken in.
    """
    are_lost = len(job_end.hosts) > 1 or bool(_not_survived(job_end))
    lost = {rank for rank, end in job_end.exits.items() if are_lost and end.code == PeerLostError.exit_code}
    stopped = {rank for rank, end in job_end.exits.items() if end.stopped}
    return lost | (stopped | job_end.missing) - job_end.done - job_end.newcomers


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
        when = _not_survived(job_end)
        why = f"lost {when}" if when else "lost, and not more than half of all are left"
        return _of(job_end, sorted(end.rank for end in failed), why)
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


def _not_survived(job_end: JobEnd) -> str:
    """When a rank was lost, if the others could not go on because of that; else empty."""
    found = (_found(_NOT_SURVIVED, end) for end in job_end.exits.values())
    return next((said[1] for said in found if said is not None), "")


def _found(pattern: re.Pattern[str], end: Exit) -> re.Match[str] | None:
    """Where the pattern is in what a rank has said at its end."""
    return pattern.search(end.traceback or end.shown or end.tail)


def _ranks_in(pattern: re.Pattern[str], end: Exit) -> list[int]:
    """The ranks that the pattern's groups find in what a rank has said at its end."""
    said = _found(pattern, end)
    return sorted(int(rank) for group in said.groups() for rank in group.split(",")) if said is not None else []


#: chorosrun's exit code for jobs whose exit code does not come from a rank.
_CODES = {Reason.INTERRUPT: 130, Reason.TERMINATE: 143, Reason.TIMEOUT: 124}
#: MPI_ERR_UNKNOWN, with which Open MPI ends a process that loses a connection to another one.
_MPI_ABORT = 14
#: If processes of several roles failed, the failure of an earlier role is the cause of a later role's.
_SUSPECTS = (PS, CHIEF, WORKER)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: the messages to show end with the traceback of ``failure``, the rank that failed first."""

    exit_code: int
    lines: tuple[str, ...] = ()
    failure: Exit | None = None


def outcome_of(job_end: JobEnd, limits: Limits) -> Outcome:
    """Returns the outcome of the job; its messages name the time limits."""
    if job_end.given_up:
        line = f"chorosrun: {job_end.given_up}. With --commit-dir, the same command goes on from the last commit."
        return Outcome(PeerLostError.exit_code, (line,))
    ends, failures = list(job_end.exits.values()), job_end.failures
    if job_end.elastic is not None:
        outcome = _elastic(job_end, job_end.elastic)
        if outcome is not None:
            return outcome
    if job_end.reason in _CODES:
        return Outcome(_CODES[job_end.reason], _stopped_lines(job_end, limits))
    if job_end.reason is Reason.STUCK:
        tracebacks = [end.traceback for end in ends if end.traceback]
        # Without it, init() cannot end: of an elastic job, too, whose others go on without any that has called it.
        cause = next((end for end in failures if end.rank not in job_end.initialized), None)
        lines = (f"chorosrun: {job_end.stuck}; the job was stopped.", *tracebacks)
        return Outcome(LaunchError.exit_code if cause is None else cause.code, lines, cause)
    if job_end.reason is Reason.OVER and not failures:
        return Outcome(0, (f"chorosrun: {job_end.stuck}. All scripts had ended: the job has finished.",))
    if job_end.chief_is_done:
        return Outcome(0, _done_lines(job_end, limits))
    # MPI_Abort stops the other ranks so fast that the rank that called it may count as stopped, too; and one that has
    # raised may take seconds to end, in which others fail because of it.
    if all(map(_lacks_another, failures)):
        raised = [end for end in ends if end.traceback or end in failures]
        # Without the signal that chorosrun has sent to one that had raised.
        failures = [replace(end, code=1, signal=0) if end.stopped and end.signal else end for end in raised]
    if failures:
        return _failed(job_end, _causes_first(job_end, failures))
    if len(ends) == job_end.size and all(end.code == 0 for end in ends):
        return Outcome(0)
    return _lost(job_end, limits)


def _elastic(job_end: JobEnd, elastic: Elastic) -> Outcome | None:
    """Returns the outcome of a job in which some ranks have failed and others have not, or that was preempted."""
    ends = [job_end.exits[rank] for rank in sorted(job_end.exits)]
    finished = [end for end in ends if end.code in (0, PREEMPTED)]
    if job_end.preempted and not job_end.members:
        line = "chorosrun: preempted while it waited for hosts. The same command goes on from the last commit."
        return Outcome(PREEMPTED, (line,))
    committed = any(end.code == PREEMPTED for end in finished)
    # Those that the signal itself ended were new, or not as far as the others, who have committed without them, as they
    # have without one that was killed: its commit is complete before any rank ends with that code.
    late = [end for end in ends if committed and end.signal not in (0, signal.SIGINT)]
    have_ended = all(end in (*finished, *late) or not end.stopped for end in ends) and not job_end.missing
    if (job_end.preempted or committed) and finished and have_ended:
        killed = [end.rank for end in late if end.stopped and end.signal == signal.SIGKILL]
        were = f"chorosrun: {job_end.roles.names(killed)} {'was' if len(killed) == 1 else 'were'} killed meanwhile."
        line = "chorosrun: preempted: the ranks have ended. The same command goes on from the last commit."
        return Outcome(PREEMPTED, (were, line) if killed else (line,))
    if job_end.reason is Reason.TOO_FEW:
        return _too_few(job_end, elastic, job_end.left)
    if job_end.reason is None and any(map(job_end.has_finished, job_end.exits)):
        lost = [job_end.started[rank] for rank in sorted(job_end.missing) if rank in job_end.started]
        return Outcome(0, tuple(f"chorosrun: rank {start.rank} on {start.host} disappeared." for start in lost))
    if job_end.reason is None and not job_end.missing and all(end.code == 0 for end in ends):
        line = (
            "chorosrun: all ranks have left, and none has made the job's last step: they were asked to end, or ended "
            "before the others. Without --commit-dir nothing is saved."
        )
        return Outcome(_CODES[Reason.TERMINATE], (line,))
    if job_end.reason is None and job_end.lost_mpirun:  # not those that were lost before have ended the job
        failed = {end.rank for end in job_end.failures} | job_end.crashed
        if job_end.done - job_end.newcomers - failed and not _interrupted(job_end):
            said = f"chorosrun: {job_end.lost_mpirun}. All scripts had ended: the job has finished."
            return Outcome(0, (said,))
        return Outcome(LaunchError.exit_code, (f"chorosrun: {job_end.lost_mpirun}, and the job with it.",))
    if job_end.reason is None and not job_end.missing and not any(end.stopped for end in ends):
        return _too_few(job_end, elastic, 0)  # when the last was lost, new ones were on their way, or others had left
    return None


def _too_few(job_end: JobEnd, elastic: Elastic, left: int) -> Outcome:
    failures = _causes_first(job_end, sorted(job_end.failures, key=lambda end: end.rank))
    raised = [end for end in failures if not end.signal and end.code != PeerLostError.exit_code]
    last = raised[0] if raised else failures[0]
    are_left = f"{left} of {len(job_end.members)} ranks {'is' if left == 1 else 'are'} left"
    lines = (
        f"chorosrun: {headline(last, job_end.roles)}; {are_left}, fewer than --min-np {elastic.least}: the job ends. "
        "With --commit-dir, the same command goes on from the last commit.",
    )
    code = last.code if raised else PeerLostError.exit_code
    # Of a rank that was left, only one that says more than that too few were.
    others = (end.traceback for end in failures if "fewer than --min-np" not in end.traceback)
    why = last.traceback or next(filter(None, others), "")
    return Outcome(code, lines + ((why,) if why else ()), last)


def _lacks_another(end: Exit) -> bool:
    return exception_name(end.traceback or end.shown) == PeerLostError.__name__


def _causes_first(job_end: JobEnd, failures: Sequence[Exit]) -> list[Exit]:
    """Returns the failures in the order of their reports, with ranks that failed because of another rank last."""
    victims = aborted_by_mpi(job_end.messages)
    raised = any(end.traceback for end in failures)

    def precedence(end: Exit) -> tuple[bool, int]:
        # mpirun's message about an abort may be lost when it is stopped; the exit code of the abort is not.
        aborted = end.rank in victims or (
            raised and end.code == _MPI_ABORT and not (end.signal or end.shown or end.tail)
        )
        is_consequence = (aborted and not end.traceback) or met_shutdown(end.traceback) or _lacks_another(end)
        role = job_end.roles.of(end.rank)
        return is_consequence, _SUSPECTS.index(role[0]) if role is not None and not end.signal else 0

    return sorted(failures, key=precedence)


def _failed(job_end: JobEnd, failures: Sequence[Exit]) -> Outcome:
    first, others = failures[0], failures[1:]
    if first.problem:
        return Outcome(first.code, (f"chorosrun: on {first.host}, {first.problem}",), first)
    lines = []
    for kind in dict.fromkeys(_kind(end) for end in others):
        same = [end.rank for end in others if _kind(end) == kind]
        lines.append(f"chorosrun: {job_end.roles.names(same)} failed too: {kind}.")
    lines.append(f"chorosrun: {headline(first, job_end.roles)}{_others_stopped(job_end, failures)}.")
    lines += _consequence(first, job_end.roles)
    if first.traceback:
        lines.append(first.traceback)
    elif first.shown:
        lines.append("chorosrun: its traceback is above.")
    elif first.tail:
        lines.append(f"Its last lines on standard error:\n{first.tail}")
    elif first.rank in aborted_by_mpi(job_end.messages):
        lines.append(explain(job_end.messages))
    return Outcome(first.code, tuple(lines), first)


def _consequence(end: Exit, roles: Roles) -> list[str]:
    role = roles.of(end.rank)
    if role is not None and role[0] == PS:
        return ["chorosrun: its shard of the variables is lost: start the job again from the last checkpoint."]
    if end.signal and end.restarts:
        return [f"chorosrun: this was restart {end.restarts}; --max-restarts allows no more."]
    return []


def _kind(end: Exit) -> str:
    if end.signal:
        return signal_name(end.signal)
    return exception_name(end.traceback) or f"exit code {end.code}"


def _others_stopped(job_end: JobEnd, failures: Sequence[Exit]) -> str:
    roles = job_end.roles
    stopped = job_end.size - len(failures) - sum(end.code == 0 and not end.stopped for end in job_end.exits.values())
    if stopped <= 0:
        return ""
    if stopped == job_end.size - 1:
        return (
            f"; the other {roles.kind(1)} was stopped"
            if stopped == 1
            else f"; the other {stopped} {roles.kind(stopped)} were stopped"
        )
    return f"; {stopped} other {roles.kind(stopped)} {'was' if stopped == 1 else 'were'} stopped"


def _stopped_lines(job_end: JobEnd, limits: Limits) -> tuple[str, ...]:
    killed = [rank for rank, end in job_end.exits.items() if end.stopped and end.signal == signal.SIGKILL]
    lines = []
    for end in job_end.exits.values():
        if exception_name(end.traceback) not in ("", "KeyboardInterrupt"):  # it failed while it shut down
            lines += [f"chorosrun: {headline(end, job_end.roles)}.", end.traceback]
    if killed:
        lines.append(
            f"chorosrun: {job_end.roles.names(killed)} did not end after the first signal and "
            f"{'was' if len(killed) == 1 else 'were'} killed."
        )
    lines += [f"chorosrun: {line}." for line in job_end.waits]
    if job_end.reason is Reason.TIMEOUT:
        lines.append(f"chorosrun: the job ran longer than --timeout {limits.run:g} and was stopped.")
    elif job_end.reason is Reason.INTERRUPT:
        lines.append("chorosrun: interrupted.")
    else:
        lines.append("chorosrun: terminated.")
    return tuple(lines)


def _done_lines(job_end: JobEnd, limits: Limits) -> tuple[str, ...]:
    roles, failed = job_end.roles, job_end.failures
    lines = [f"chorosrun: after the chief had ended, {headline(end, roles)}." for end in failed]
    lines += [end.traceback for end in failed if end.traceback]
    late = [rank for rank in range(job_end.size) if rank not in job_end.exits or job_end.exits[rank].stopped]
    if late:
        was = "was" if len(late) == 1 else "were"
        lines.append(
            f"chorosrun: {roles.names(late)} did not end within {limits.grace:g} s after the chief and {was} stopped."
        )
    return tuple(lines)


def _lost(job_end: JobEnd, limits: Limits) -> Outcome:
    """Returns the outcome of a job with ranks that never started or did not report their end."""
    code, roles = LaunchError.exit_code, job_end.roles
    unreported = [start for rank, start in sorted(job_end.started.items()) if rank not in job_end.exits]
    if len(job_end.started) < job_end.size:
        missing = [rank for rank in range(job_end.size) if rank not in job_end.started]
        what = f"mpirun could not start {roles.names(missing)}"
        if job_end.reason is Reason.START_TIMEOUT:
            what = f"{roles.names(missing)} did not start within --start-timeout {limits.start:g} s"
        elif not explain(job_end.messages):
            what += " and gave no reason. With --network-interfaces, every host needs interfaces with these names"
    elif job_end.lost_mpirun:
        return Outcome(code, (f"chorosrun: {job_end.lost_mpirun}, and the job with it.",))
    elif unreported:
        lost = lost_hosts(job_end.messages)
        on_lost_hosts = [start for start in unreported if start.host in lost]
        hosts = ", ".join(sorted({start.host for start in on_lost_hosts or unreported}))
        what = f"{roles.names([start.rank for start in on_lost_hosts or unreported])} on {hosts} disappeared"
        if on_lost_hosts:
            return Outcome(code, (f"chorosrun: {what}: the host went down or can no longer be reached.",))
        what += ": the processes were killed or the host went down"
    else:
        what = "mpirun ended the job"
        code = job_end.mpirun_code if 0 < job_end.mpirun_code < 256 else code
    return Outcome(code, (f"chorosrun: {what}. {explain(job_end.messages)}".rstrip(),))
