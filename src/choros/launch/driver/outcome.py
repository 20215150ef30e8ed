"""How a job went, in words and as an exit code. Pure: from what became of its ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from choros.errors import LaunchError
from choros.launch.driver.mpirun_messages import aborted_by_mpi, explain, lost_hosts, met_shutdown
from choros.launch.driver.stopping import Reason, signal_name
from choros.launch.driver.supervisor import Outcome
from choros.launch.plan.limits import Limits
from choros.launch.plan.roles import CHIEF, PS, WORKER, Roles
from choros.launch.protocol.frames import Exit

__all__ = ["Verdict", "exception_name", "judge"]

_EXCEPTION = re.compile(r"^(?:  \| )?([A-Za-z_][\w.]*)(?::.*)?$")
#: chorosrun's exit code, where the ranks' do not give it.
_CODES = {Reason.INTERRUPT: 130, Reason.TERMINATE: 143, Reason.TIMEOUT: 124}
#: Of several that failed, who did so because of whom: the last because of the first.
_SUSPECTS = (PS, CHIEF, WORKER)
_ADVICE: dict[int, str] = {
    signal.SIGKILL: "out of memory, or kill -9?",
    signal.SIGSEGV: "a bug in compiled code, or a library that does not fit this machine?",
    signal.SIGBUS: "is shared memory (/dev/shm) full?",
    signal.SIGILL: "a library built for another processor?",
    signal.SIGABRT: "a library gave up; see what it wrote last.",
}


@dataclass(frozen=True)
class Verdict:
    """What chorosrun ends with.

    Attributes:
        exit_code: its exit code.
        lines: what it says, in this order; the traceback of the rank that failed first comes last.
        failure: how the rank that failed first ended, if one did.
    """

    exit_code: int
    lines: tuple[str, ...] = ()
    failure: Exit | None = None


def judge(outcome: Outcome, limits: Limits) -> Verdict:
    """How the job went.

    Args:
        outcome: what became of it.
        limits: how long things might take, for the messages.
    """
    ends = list(outcome.exits.values())
    failures = [end for end in ends if end.code != 0 and not end.stopped]
    if outcome.reason in _CODES:
        return Verdict(_CODES[outcome.reason], _stopped_lines(outcome, limits))
    if outcome.chief_is_done:
        return Verdict(0, _done_lines(outcome, limits))
    if not failures:  # MPI_Abort has the others stopped so fast that its caller may look stopped as well
        failures = [end for end in ends if end.traceback]
    if failures:
        return _failed(outcome, _causes_first(outcome, failures))
    if len(ends) == outcome.size and all(end.code == 0 for end in ends):
        return Verdict(0)
    return _lost(outcome, limits)


def _causes_first(outcome: Outcome, failures: Sequence[Exit]) -> list[Exit]:
    """In the order in which we heard of them, but for ranks that failed because another had gone."""
    victims = aborted_by_mpi(outcome.messages)

    def precedence(end: Exit) -> tuple[bool, int]:
        is_consequence = (end.rank in victims and not end.traceback) or met_shutdown(end.traceback)
        role = outcome.roles.of(end.rank)
        return is_consequence, _SUSPECTS.index(role.name) if role is not None and not end.signal else 0

    return sorted(failures, key=precedence)


def _failed(outcome: Outcome, failures: Sequence[Exit]) -> Verdict:
    first, others = failures[0], failures[1:]
    if first.problem:
        return Verdict(first.code, (f"chorosrun: on {first.host}, {first.problem}",), first)
    lines = []
    for kind in dict.fromkeys(_kind(end) for end in others):
        alike = [end.rank for end in others if _kind(end) == kind]
        lines.append(f"chorosrun: {outcome.roles.names(alike)} failed too: {kind}.")
    lines.append(f"chorosrun: {_headline(first, outcome.roles)}{_fate_of_others(outcome, failures)}.")
    lines += _loss(first, outcome.roles)
    if first.traceback:
        lines.append(first.traceback)
    elif first.shown:
        lines.append("chorosrun: its traceback is above.")
    elif first.tail:
        lines.append(f"The last it wrote to standard error:\n{first.tail}")
    elif first.rank in aborted_by_mpi(outcome.messages):
        lines.append(explain(outcome.messages))
    return Verdict(first.code, tuple(lines), first)


def _headline(end: Exit, roles: Roles) -> str:
    who = f"{roles.name(end.rank)} on {end.host}"
    if end.signal:
        advice = _ADVICE.get(end.signal, "")
        return f"{who} was killed by {signal_name(end.signal)} (signal {end.signal})" + (
            f": {advice}" if advice else ""
        )
    exception = exception_name(end.traceback)
    return f"{who} failed with exit code {end.code}" + (f" ({exception})" if exception else "")


def _loss(end: Exit, roles: Roles) -> list[str]:
    """What its end means to the job."""
    role = roles.of(end.rank)
    if role is not None and role.name == PS:
        return ["chorosrun: its part of the variables is lost: start the job again from its last checkpoint."]
    if end.signal and end.restarts:
        return [f"chorosrun: this was restart {end.restarts}; --max-restarts allows no more."]
    return []


def _kind(end: Exit) -> str:
    if end.signal:
        return signal_name(end.signal)
    return exception_name(end.traceback) or f"exit code {end.code}"


def _fate_of_others(outcome: Outcome, failures: Sequence[Exit]) -> str:
    roles = outcome.roles
    stopped = outcome.size - len(failures) - sum(end.code == 0 and not end.stopped for end in outcome.exits.values())
    if stopped == 0:
        return ""
    if stopped == outcome.size - 1:
        return (
            f"; the other {roles.kind(1)} was stopped"
            if stopped == 1
            else f"; the other {stopped} {roles.kind(stopped)} were stopped"
        )
    return f"; {stopped} other {roles.kind(stopped)} {'was' if stopped == 1 else 'were'} stopped"


def exception_name(traceback: str) -> str:
    """The name of the exception a traceback ends with, empty if there is none.

    Example:
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


def _stopped_lines(outcome: Outcome, limits: Limits) -> tuple[str, ...]:
    killed = [rank for rank, end in outcome.exits.items() if end.stopped and end.signal == signal.SIGKILL]
    lines = []
    for end in outcome.exits.values():
        if exception_name(end.traceback) not in ("", "KeyboardInterrupt"):  # it failed while it was ending
            lines += [f"chorosrun: {_headline(end, outcome.roles)}.", end.traceback]
    if killed:
        lines.append(
            f"chorosrun: {outcome.roles.names(killed)} did not end when asked, and "
            f"{'was' if len(killed) == 1 else 'were'} killed."
        )
    if outcome.reason is Reason.TIMEOUT:
        lines.append(f"chorosrun: the job ran longer than --timeout {limits.run:g} and was stopped.")
    elif outcome.reason is Reason.INTERRUPT:
        lines.append("chorosrun: interrupted.")
    else:
        lines.append("chorosrun: terminated.")
    return tuple(lines)


def _done_lines(outcome: Outcome, limits: Limits) -> tuple[str, ...]:
    """What did not end as it should after the chief."""
    roles, ends = outcome.roles, outcome.exits.values()
    failed = [end for end in ends if end.code != 0 and not end.stopped]
    lines = [f"chorosrun: after the chief had ended, {_headline(end, roles)}." for end in failed]
    lines += [end.traceback for end in failed if end.traceback]
    late = [rank for rank in range(outcome.size) if rank not in outcome.exits or outcome.exits[rank].stopped]
    if late:
        was = "was" if len(late) == 1 else "were"
        lines.append(
            f"chorosrun: {roles.names(late)} did not end within {limits.grace:g} s after the chief, and {was} stopped."
        )
    return tuple(lines)


def _lost(outcome: Outcome, limits: Limits) -> Verdict:
    """Ranks that never started, or did not report their end."""
    code, roles = LaunchError.exit_code, outcome.roles
    unheard = [start for rank, start in sorted(outcome.started.items()) if rank not in outcome.exits]
    if len(outcome.started) < outcome.size:
        missing = [rank for rank in range(outcome.size) if rank not in outcome.started]
        what = f"mpirun could not start {roles.names(missing)}"
        if outcome.reason is Reason.START_TIMEOUT:
            what = f"{roles.names(missing)} did not start within --start-timeout {limits.start:g} s"
        elif not explain(outcome.messages):
            what += " and does not say why. With --network-interfaces, every host needs interfaces of these names"
    elif unheard:
        lost = lost_hosts(outcome.messages)
        gone = [start for start in unheard if start.host in lost]
        hosts = ", ".join(sorted({start.host for start in gone or unheard}))
        what = f"{roles.names([start.rank for start in gone or unheard])} on {hosts} disappeared"
        if gone:
            return Verdict(code, (f"chorosrun: {what}: the host went down, or cannot be reached any more.",))
        what += ": the processes were killed, or the host went down"
    else:
        what = "mpirun ended the job"
        code = outcome.mpirun_code if 0 < outcome.mpirun_code < 256 else code
    return Verdict(code, (f"chorosrun: {what}. {explain(outcome.messages)}".rstrip(),))
