"""What elastic training asks of the ranks of the job: whether they change, and to let a change happen."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from choros.comm import NEWCOMER, admit, global_process_set, is_initialized, on_change, opening, raising_losses
from choros.config import COMMIT_DIR
from choros.elastic.commit_store import CommitStore

__all__ = ["Commits", "ElasticJob", "HostUpdate", "elastic_job", "use_elastic_job"]


class HostUpdate(enum.IntEnum):
    """How the hosts of the job will change; a larger number has precedence."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


class Commits(Protocol):
    """Commits on disk."""

    def write(self, state: Any) -> int | None:
        """Writes a commit: dicts and lists of arrays, bytes, numbers and strings; returns its number, if any."""

    def load_last(self, *, own: bool = False) -> Any:
        """Returns an object whose ``state`` was written last; ``None`` if there is none."""


class ElasticJob:
    """The ranks of this job; tests use a subclass of it, by ``use_elastic_job``."""

    @property
    def survives(self) -> bool:
        """Whether the others go on when a rank is lost."""
        return is_initialized() and global_process_set.communicator.elastic

    def raising(self) -> AbstractContextManager[Any]:
        """A block in which the loss of a rank is raised on all others, as a ``PeerLostError``, once they are fewer.

        Elsewhere they make the failed collective again, and go on.
        """
        return raising_losses() if self.survives else nullcontext()

    def opening(self) -> AbstractContextManager[None]:
        """A block in which lost ranks are replaced whenever all ranks call ``admit``."""
        return opening() if is_initialized() else nullcontext()

    def pending(self) -> HostUpdate:
        """How the ranks are about to change, as far as this process knows."""
        return HostUpdate.ADDED if global_process_set.communicator.noticed & NEWCOMER else HostUpdate.NONE

    @property
    def is_new(self) -> bool:
        """Whether this process waits to be taken in."""
        return is_initialized() and global_process_set.communicator.is_new

    def admit(self) -> bool:
        """Takes in the rank that waits for it; returns in such a rank when it has been taken in. All ranks call it.

        Returns:
            Whether this rank goes on; ``False`` in a new one when the others are in a later block.
        """
        if not is_initialized():
            return True
        is_new = self.is_new
        return admit() or not is_new

    def on_change(self, listener: Callable[[Mapping[int, int]], None]) -> None:
        """Calls ``listener`` after each change with the new rank of each rank that has stayed, by its old one."""
        on_change(lambda change: listener(change.new_ranks))

    def commits(self) -> Commits | None:
        """The commits on disk; ``None`` if commits are only in memory."""
        directory = COMMIT_DIR.read(os.environ)
        return CommitStore(directory) if directory else None


_current = ElasticJob()


def elastic_job() -> ElasticJob:
    """Returns the ranks of this job."""
    return _current


def use_elastic_job(changing: ElasticJob) -> None:
    """Makes ``changing`` what ``elastic_job`` returns."""
    global _current
    _current = changing
