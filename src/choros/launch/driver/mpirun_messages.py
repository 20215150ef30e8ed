"""What mpirun itself says, and what can be learned from it."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["aborted_by_mpi", "explain", "lost_hosts", "met_shutdown"]

#: What mpirun says → what it means.
_KNOWN = {
    "not enough slots": "mpirun found fewer slots than ranks: name hosts with more slots with -H name:slots.",
    "MPI_ABORT was invoked": "A rank called MPI_Abort.",
    "MPI_ERRORS_ARE_FATAL": "MPI met an error that it does not survive.",
    "daemon|resolve|not known": (
        "mpirun's daemon on a host cannot be started or reached: check that `ssh HOST true` works without a question, "
        "and that Python, choros and Open MPI are at the same place on every host."
    ),
    "unable to find|could not find|No such file or directory": (
        "A host lacks a program: Python, choros and Open MPI must be at the same place on every host."
    ),
}
_ABORTED = re.compile(r"\*\*\* reported by process \[\d+,(\d+)\]")
_LOST = re.compile(r"Remote host:\s*(\S+)|Remote daemon:.* on node (\S+)")


def explain(messages: Iterable[str]) -> str:
    """What mpirun's messages mean, in a sentence where we know one; then the messages themselves."""
    lines = [line for line in messages if line.strip(" -")]
    if not lines:
        return ""
    text = "\n".join(lines)
    known = next((means for says, means in _KNOWN.items() if re.search(says, text, re.IGNORECASE)), "")
    shown = "\n".join(f"  {line}" for line in lines[-30:])
    return f"{known} mpirun said:\n{shown}".lstrip()


def aborted_by_mpi(messages: Iterable[str]) -> frozenset[int]:
    """The ranks that MPI ended because of an error, such as that another rank has gone.

    Example:
        >>> aborted_by_mpi(["[a:00000] *** reported by process [917831681,2]"])
        frozenset({2})
    """
    return frozenset(int(rank) for line in messages for rank in _ABORTED.findall(line))


def lost_hosts(messages: Iterable[str]) -> frozenset[str]:
    """The hosts that mpirun says it has lost.

    Example:
        >>> lost_hosts(["  Remote host:   b"])
        frozenset({'b'})
    """
    found = (_LOST.search(line) for line in messages)
    return frozenset((match[1] or match[2]).rstrip(".,") for match in found if match is not None)


def met_shutdown(traceback: str) -> bool:
    """Whether a rank failed because it wanted to communicate with one that was ending.

    Example:
        >>> met_shutdown("choros.errors.MismatchError: …\\n  rank 0: barrier()\\n  rank 1: shutdown()")
        True
    """
    return "MismatchError" in traceback and ": shutdown()" in traceback
