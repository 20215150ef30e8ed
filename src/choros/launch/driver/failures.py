"""How a rank has failed, and what mpirun's own messages mean, in words. Pure."""

import re
import signal
from collections.abc import Iterable

from choros.launch.driver.job_end import signal_name
from choros.launch.plan.roles import Roles
from choros.launch.protocol.frames import Exit

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
