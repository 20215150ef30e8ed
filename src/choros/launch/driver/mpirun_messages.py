"""Interprets mpirun's own messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["aborted_by_mpi", "explain", "lost_hosts", "met_shutdown"]

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

    Example:
        >>> aborted_by_mpi(["[a:00000] *** reported by process [917831681,2]"])
        frozenset({2})
    """
    return frozenset(int(rank) for line in messages for rank in _ABORTED.findall(line))


def lost_hosts(messages: Iterable[str]) -> frozenset[str]:
    """Returns the hosts that mpirun reports as lost.

    Example:
        >>> lost_hosts(["  Remote host:   b"])
        frozenset({'b'})
    """
    found = (_LOST.search(line) for line in messages)
    return frozenset((match[1] or match[2]).rstrip(".,") for match in found if match is not None)


def met_shutdown(traceback: str) -> bool:
    """Returns whether a rank failed because it called a collective while another rank shut down.

    Example:
        >>> met_shutdown("choros.errors.MismatchError: …\\n  rank 0: barrier()\\n  rank 1: shutdown()")
        True
    """
    return "MismatchError" in traceback and ": shutdown()" in traceback
