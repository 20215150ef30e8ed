"""What elastic training asks of the ranks of the job: whether they change, and to let a change happen. Tests replace
these functions, so callers take them from the module.
"""

import enum
import itertools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import choros.comm as comm
from choros.comm import global_process_set, is_initialized
from choros.elastic.commit_store import CommitStore
from choros.parallel import objects
from choros.settings import current

T = TypeVar("T")
_calls = itertools.count(1)


class HostUpdate(enum.IntEnum):
    """How the hosts of the job will change; a larger number has precedence."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


def survives() -> bool:
    """Whether the others go on when a rank is lost."""
    return is_initialized() and global_process_set.communicator.elastic


def members() -> int:
    """The number of ranks that there are."""
    return global_process_set.communicator.size if is_initialized() else 1


def raising() -> AbstractContextManager[Any]:
    """In this block the others raise a rank's loss as ``PeerLostError``; elsewhere they repeat the collective."""
    return comm.raising_losses() if survives() else nullcontext()


def opening() -> AbstractContextManager[None]:
    """A block in which lost ranks are replaced whenever all ranks call ``admit``."""
    return comm.opening() if is_initialized() else nullcontext()


def pending() -> HostUpdate:
    """How the ranks are about to change, as far as this process knows; a nested function takes none in."""
    comes = global_process_set.communicator.noticed & comm.NEWCOMER and not is_nested()
    return HostUpdate.ADDED if comes else HostUpdate.NONE


def is_nested() -> bool:
    """Whether the present block is in another one."""
    return comm.openings() > 1


def is_new() -> bool:
    """Whether this process waits to be taken in."""
    return is_initialized() and global_process_set.communicator.is_new


def admit() -> bool:
    """Takes in a waiting rank; all ranks call it. ``False`` in a new one when the others are in a later block."""
    was_new = is_new()
    return not is_initialized() or comm.admit() or not was_new


def shared_result(own: T) -> T:
    """Returns ``own``; in a process that has passed a block by, the result of rank 0."""
    return objects.shared_result(own) if is_initialized() else own


def commits() -> CommitStore | None:
    """The commits on disk of the next function that is called; ``None`` if commits are only in memory."""
    number, directory = next(_calls), current().commit_dir
    return CommitStore(Path(directory) / f"run-{number}") if directory else None
