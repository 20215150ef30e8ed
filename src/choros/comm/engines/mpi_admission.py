"""New ranks of an elastic job: rank 0 starts one in the place of a lost one; all take it in between two collectives.

::

    rank 0, in a thread     the new process                  all ranks
    Spawn ────────────────► MPI_Init
    ◄────── hello ───────── init()
    Merge ◄───────────────► Merge                            a communicator of these two
    ───── invitation ─────► the script runs as if all ranks did the same (newcomer.py), until it
    ◄────── at(k) ───────── comes to the k-th opening
                                                             the agreement at the end of a collective tells all of it
    ────── come in ───────► Create_intercomm, Merge ◄──────► Create_intercomm, Merge

An *opening* is a part of the program, such as a call of ``fit``, in which all ranks ask again and again whether a new
one waits. All have the same openings in the same order. A new rank that comes to one that is over waits for the next
one, and passes it by when that begins; so it does not run what comes after the last one, such as saving the model.

If rank 0 is lost meanwhile, the new process leaves, and the next rank 0 starts another. If the new process is lost,
rank 0 starts another, a few times.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never, final

from mpi4py import MPI

from choros.comm.engines.mpi_survivors import revoke
from choros.comm.facts import Facts
from choros.config import RESET_LIMIT, SPAWN

__all__ = ["Admissions", "Entrance", "Invitation", "joined"]

_log = logging.getLogger("choros")

#: After so many processes in a row that were lost before they were taken in, no other is started.
_TRIES = 3
_POLL_SECONDS = 0.05
#: A new process that was called in, and is not a member after so many seconds, ends.
_JOIN_SECONDS = 60.0
_HELLO, _AT, _ANSWER, _JOIN = range(4)


@dataclass(frozen=True)
class Invitation:
    """What a new rank receives.

    Attributes:
        number: its number at the launcher, that of the lost rank.
        hosts: for each number of the ranks at the start, the name of its host.
        facts: what the ranks have sent each other.
        gone: the numbers of ranks that have left in order.
        admitted: how many new ranks have been taken in.
    """

    number: int
    hosts: tuple[str, ...]
    facts: Facts
    gone: frozenset[int] = frozenset()
    admitted: int = 0


class _NewRank:
    """A process that rank 0 has started, until it is taken in.

    Args:
        invitation: what it receives.
        passes: whether the opening of this number is over, and another one has begun.

    Attributes:
        invitation: the argument.
        at: the number of the opening in which it waits; ``None`` before it has come to one.
        problem: why it will not come; empty if it may.
    """

    def __init__(self, invitation: Invitation, passes: Callable[[int], bool]) -> None:
        self.invitation = invitation
        self.at: int | None = None
        self.problem = ""
        self._passes = passes
        self._pair: MPI.Intracomm | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="choros: a new rank", daemon=True)
        self._thread.start()

    def call_in(self) -> MPI.Intracomm:
        """Calls the process in; returns the communicator of it and this rank."""
        self._stopped.set()
        self._thread.join()
        assert self._pair is not None  # noqa: S101  (it has come to an opening)
        self._pair.send(True, 1, _ANSWER)
        return self._pair

    def dismiss(self) -> None:
        """Asks the process to end, if it is connected; else chorosrun ends it."""
        self._stopped.set()
        if self._pair is not None and not self.problem:
            try:
                self._pair.isend(None, 1, _ANSWER)
            except MPI.Exception as error:
                self.problem = str(error)

    def _run(self) -> None:
        try:
            pair = self._meet()
            pair.send(self.invitation, 1, _ANSWER)
            self._pair = pair
            while not self._stopped.wait(_POLL_SECONDS):
                _check(pair)
                if pair.Iprobe(1, _AT):
                    self.at = pair.recv(source=1, tag=_AT)
                if self.at is not None and self._passes(self.at):
                    self.at = None
                    pair.send(False, 1, _ANSWER)
        except MPI.Exception as error:
            self.problem = error.Get_error_string()

    def _meet(self) -> MPI.Intracomm:
        command = [each.replace("{place}", str(self.invitation.number)) for each in json.loads(SPAWN.read(os.environ))]
        child = MPI.COMM_SELF.Spawn(command[0], command[1:])
        child.Set_errhandler(MPI.ERRORS_RETURN)
        _received(child, _HELLO)
        pair = MPI.Intracomm(child.Merge(high=False))
        pair.Set_errhandler(MPI.ERRORS_RETURN)
        return pair


@final
class Admissions:
    """The openings of this job, and the new rank that is under way.

    Args:
        hosts: for each number of the ranks at the start, the name of its host.
        facts: as in an ``Invitation``; a rank that is started receives those of that moment.
        gone: likewise.
        admitted: likewise.

    Attributes:
        number: the number of the last opening that this rank has come to.
    """

    def __init__(self, hosts: Sequence[str], facts: Facts, gone: Iterable[int] = (), admitted: int = 0) -> None:
        self.number = 0
        self._hosts, self._facts = tuple(hosts), facts
        self._gone = frozenset(gone)
        self._admitted = admitted
        self._limit = int(RESET_LIMIT.read(os.environ) or sys.maxsize)
        self._open = False
        self._new: _NewRank | None = None
        self._failures = 0

    @contextmanager
    def opening(self) -> Iterator[None]:
        """An opening; all ranks enter it at the same place of the program."""
        self.number, self._open = self.number + 1, True
        try:
            yield
        finally:
            self._open = False

    def is_someone_ready(self, launched: Sequence[int]) -> bool:
        """Whether a new rank waits to be taken in; starts one if one of the first ranks is missing. Rank 0 calls it.

        Args:
            launched: the numbers of the present ranks at the launcher.
        """
        is_complete = len(launched) + len(self._gone) >= len(self._hosts)
        if is_complete or not self._open or self._admitted >= self._limit or not SPAWN.read(os.environ):
            return False
        new = self._new
        if new is not None and new.problem:
            self._failures += 1
            if self._failures == _TRIES:
                _log.warning("no further rank is started: %d have ended before they could join.", _TRIES)
            self._new = new = None
        if new is not None and new.invitation.facts != self._facts:  # it runs the script with others
            new.dismiss()
            self._new = new = None
        if new is None and self._failures < _TRIES:
            number = next(each for each in range(len(self._hosts)) if each not in {*launched, *self._gone})
            invitation = Invitation(number, self._hosts, list(self._facts), self._gone, self._admitted)
            self._new = _NewRank(invitation, lambda number: number < self.number)
        return new is not None and new.at == self.number

    def call_in(self) -> MPI.Intracomm:
        """Calls the new rank in; returns the communicator of it and this rank."""
        assert self._new is not None  # noqa: S101  (it was ready)
        new, self._new = self._new, None
        return new.call_in()

    def let_go(self, numbers: Iterable[int]) -> None:
        """Notes that these ranks have left in order."""
        self._gone |= frozenset(numbers)

    def note(self, *, admitted: bool) -> None:
        """Counts new ranks that were taken in, or were lost before that."""
        self._failures = 0 if admitted else self._failures + 1
        self._admitted += admitted

    def end(self) -> None:
        """Dismisses a new rank that has not come in."""
        if self._new is not None:
            self._new.dismiss()


@final
class Entrance:
    """How this process, which a rank has started, becomes a rank.

    Args:
        parent: the communicator of it and that rank.

    Attributes:
        invitation: what this process has received.
    """

    def __init__(self, parent: MPI.Intercomm) -> None:
        parent.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            parent.send(None, 0, _HELLO)
            self._pair = MPI.Intracomm(parent.Merge(high=True))
            self._pair.Set_errhandler(MPI.ERRORS_RETURN)
            self.invitation: Invitation = _received(self._pair, _ANSWER)
        except MPI.Exception as error:
            self._leave(error)

    def wait(self, opening: int) -> MPI.Intracomm | None:
        """Waits in an opening; returns the communicator with the rank that has started this one, or ``None``: pass by.

        Raises:
            SystemExit: the others have ended, or this process is not needed.
        """
        try:
            self._pair.send(opening, 0, _AT)
            answer = _received(self._pair, _ANSWER)
        except MPI.Exception as error:
            self._leave(error)
        if answer is None:
            self._leave("the others have ended")
        return self._pair if answer else None

    def _leave(self, reason: object) -> Never:
        _log.info("this process was to become a rank, but is not needed any more: %s.", reason)
        sys.exit(0)


def joined(members: MPI.Intracomm, pair: MPI.Intracomm | None, *, is_new: bool) -> MPI.Intracomm:
    """Returns the communicator of the members and a new rank, which is the last one.

    Args:
        members: this rank and those with it: the new rank is alone.
        pair: the communicator of rank 0 and the new rank; ``None`` on other ranks.
        is_new: whether this is the new rank.

    Raises:
        MPI.Exception: one of them was lost.
    """
    with _watched(members, pair, is_new=is_new):
        between = members.Create_intercomm(0, pair or members, 0 if is_new else 1, _JOIN)
        comm = MPI.Intracomm(between.Merge(high=is_new))
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm


@contextmanager
def _watched(members: MPI.Intracomm, pair: MPI.Intracomm | None, *, is_new: bool) -> Iterator[None]:
    """Open MPI does not tell the members that the process which they connect to is lost: this thread does."""
    done, started = threading.Event(), time.monotonic()

    def watch() -> None:
        while pair is not None and not done.wait(_POLL_SECONDS):
            if is_new and time.monotonic() - started > _JOIN_SECONDS:
                os._exit(1)
            if pair.Get_failed().Get_size():
                revoke(members, pair)
                return

    thread = threading.Thread(target=watch, name="choros: watches a new rank", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _received(comm: MPI.Comm, tag: int) -> Any:
    """Waits for a message of rank 0 of ``comm``, without using a core; returns it."""
    while not comm.Iprobe(0, tag):
        time.sleep(_POLL_SECONDS)
        _check(comm)
    return comm.recv(source=0, tag=tag)


def _check(comm: MPI.Comm) -> None:
    """Raises MPI's error if a member is lost."""
    if comm.Get_failed().Get_size():
        raise MPI.Exception(MPI.ERR_PROC_FAILED)
