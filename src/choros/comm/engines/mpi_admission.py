"""New ranks of an elastic job: rank 0 starts them in slots that are free; all take them in between two collectives.

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

If rank 0 is lost meanwhile, new processes leave, and the next rank 0 starts others. If a new process is lost, rank 0
starts another, a few times. It starts them one after the other; several may wait in an opening.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never, Self, final

from mpi4py import MPI

from choros.comm.engines.mpi_gate import RankGate, greet
from choros.comm.engines.mpi_survivors import revoke
from choros.comm.facts import Facts
from choros.config import RESET_LIMIT, SESSION_BYTES, SPAWN, START_TIMEOUT

__all__ = ["Admissions", "Entrance", "Invitation", "RankSlots", "joined"]

_log = logging.getLogger("choros")

#: After so many processes in a row that were lost before they were taken in, no other is started.
_TRIES = 3
_POLL_SECONDS = 0.05
#: A new process that was called in, and is not a member after so many seconds, ends.
_JOIN_SECONDS = 60.0
_HELLO, _AT, _ANSWER, _JOIN = range(4)


@dataclass(frozen=True)
class RankSlots:
    """Where the ranks of a job may be; the numbers are those of the launcher.

    Attributes:
        size: the number of ranks at the start, which have the first slots.
        hosts: for each slot, the name of its host.
        leaders: for each slot, the first one on the same host.

    Example:
        >>> slots = RankSlots.of(3, ["a", "a", "b", "b"])
        >>> slots.leaders, slots.known_to(1), slots.known_to(3)
        ((0, 0, 2, 2), (0, 0, 2), (0, 0, 2, 2))
    """

    size: int
    hosts: tuple[str, ...]
    leaders: tuple[int, ...]

    @classmethod
    def of(cls, size: int, hosts: Sequence[str]) -> Self:
        """Returns the slots on ``hosts``."""
        return cls(size, tuple(hosts), tuple(map(hosts.index, hosts)))

    def free(self, taken: Container[int], present: Sequence[int], *, far: bool) -> int | None:
        """Returns the first slot where a rank can be started; ``None`` if there is none.

        Args:
            taken: slots that are not free.
            present: those of the present ranks. On a host without ranks Open MPI starts none.
            far: whether it may be on another host than that of the first of the present ranks.
        """
        leaders = {self.leaders[each] for each in (present if far else present[:1])}
        free = (slot for slot in range(len(self.hosts)) if slot not in taken)
        return next((slot for slot in free if self.leaders[slot] in leaders), None)

    def are_near(self, slot: int, other: int) -> bool:
        """Whether two slots are on the same host."""
        return self.leaders[slot] == self.leaders[other]

    def known_to(self, number: int) -> tuple[int, ...]:
        """Returns the leaders of all ranks that a new one takes to exist: those of the start, and itself."""
        return self.leaders[: max(self.size, number + 1)]


@dataclass(frozen=True)
class Invitation:
    """What a new rank receives.

    Attributes:
        number: its number at the launcher.
        slots: where ranks may be.
        facts: what the ranks have sent each other.
    """

    number: int
    slots: RankSlots
    facts: Facts


class _NewRank:
    """A process that rank 0 has started, until it is taken in.

    Args:
        invitation: what it receives.
        passes: whether the opening of this number is over, and another one has begun.
        gate: the gate before this rank.

    Attributes:
        invitation: the argument.
        at: the number of the opening in which it waits; ``None`` before it has come to one.
        problem: why it will not come; empty if it may.
    """

    def __init__(self, invitation: Invitation, passes: Callable[[int], bool], gate: RankGate) -> None:
        self.invitation = invitation
        self.at: int | None = None
        self.problem = ""
        self._passes = passes
        self._gate = gate
        self._pair: MPI.Intracomm | None = None
        self._overdue = time.monotonic() + START_TIMEOUT.number(os.environ, "seconds")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="choros: a new rank", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        """Whether it has called ``init()``."""
        return self._pair is not None

    def check(self) -> None:
        """Gives it up if it has not called ``init()`` in time: MPI does not tell that it has ended before that."""
        if not self.is_connected and time.monotonic() > self._overdue and not self.problem:
            self.problem = "it has not called init() in time"
            self._stopped.set()

    def call_in(self, gone: frozenset[int], admitted: int) -> MPI.Intracomm:
        """Calls the process in, with the arguments of its ``Admissions.begin``; returns the communicator with it."""
        self._stopped.set()
        self._thread.join()
        assert self._pair is not None  # noqa: S101  (it has come to an opening)
        self._pair.send((gone, admitted), 1, _ANSWER)
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
            with self._gate.opened():
                pair = self._meet()
            pair.send(self.invitation, 1, _ANSWER)
            if self._stopped.is_set():  # given up
                pair.send(None, 1, _ANSWER)
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
        number, slots = self.invitation.number, self.invitation.slots
        new_rank = ",".join(map(str, (number, *slots.known_to(number))))
        command = [each.replace("{new_rank}", new_rank) for each in json.loads(SPAWN.read(os.environ))]
        info = MPI.INFO_NULL
        if len(set(slots.hosts)) > 1:
            info = MPI.Info.Create({"host": slots.hosts[number]})
        child = MPI.COMM_SELF.Spawn(command[0], command[1:], info=info)
        child.Set_errhandler(MPI.ERRORS_RETURN)
        _received(child, _HELLO)
        pair = MPI.Intracomm(child.Merge(high=False))
        pair.Set_errhandler(MPI.ERRORS_RETURN)
        return pair


@final
class Admissions:
    """The openings of this job, and the new ranks that are under way.

    Args:
        slots: where ranks may be.
        facts: as in an ``Invitation``; a rank that is started receives those of that moment.
        gate: the gate before this rank.

    Attributes:
        number: the number of the last opening that this rank has come to.
    """

    def __init__(self, slots: RankSlots, facts: Facts, gate: RankGate) -> None:
        self.number = 0
        self._slots, self._facts, self._gate = slots, facts, gate
        self._gone = frozenset[int]()
        self._admitted = 0
        self._limit = int(RESET_LIMIT.read(os.environ) or sys.maxsize)
        self._open = False
        self._new: list[_NewRank] = []
        self._failures = 0
        #: Whether this rank has started one on another host. Open MPI does not connect it to a second one.
        self._has_far = False
        self._warned = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """An opening; all ranks enter it at the same place of the program."""
        self.number, self._open = self.number + 1, True
        try:
            yield
        finally:
            self._open = False

    def is_someone_ready(self, launched: Sequence[int]) -> bool:
        """Whether a new rank waits to be taken in; starts one if a slot is free. Rank 0 calls it.

        Args:
            launched: the numbers of the present ranks at the launcher.
        """
        if len(launched) + len(self._gone) >= len(self._slots.hosts) or not self._open or not SPAWN.read(os.environ):
            return False
        for new in self._new:
            new.check()
            if new.problem:
                self._failures += 1
                if self._failures == _TRIES:
                    _log.warning("no further rank is started: %d have ended before they could join.", _TRIES)
            elif new.invitation.facts != self._facts:  # it runs the script with others
                new.dismiss()
        self._new = [new for new in self._new if not new.problem and new.invitation.facts == self._facts]
        may_start = all(new.is_connected for new in self._new) and self._failures < _TRIES
        if may_start and self._admitted + len(self._new) < self._limit:
            taken = {*launched, *self._gone, *(new.invitation.number for new in self._new)}
            number = self._slots.free(taken, launched, far=not self._has_far)
            if number is not None and self._has_room():
                self._has_far = self._has_far or not self._slots.are_near(number, launched[0])
                invitation = Invitation(number, self._slots, list(self._facts))
                self._new.append(_NewRank(invitation, lambda number: number < self.number, self._gate))
        return any(new.at == self.number for new in self._new)

    def _has_room(self) -> bool:
        """Whether mpirun can write what it keeps of a new rank: else SIGBUS would end it, and all ranks with it."""
        directory = os.environ.get("PMIX_SERVER_TMPDIR", "")
        try:
            status = os.statvfs(directory)
        except OSError:  # not Open MPI's mpirun
            return True
        has_room = status.f_bavail * status.f_frsize >= SESSION_BYTES
        if not has_room and not self._warned:
            self._warned = True
            _log.warning(
                "no new rank is started: %s has less than %d MiB left. The job goes on with fewer ranks until there is "
                "room.", directory, SESSION_BYTES >> 20,
            )  # fmt: skip
        return has_room

    def call_in(self) -> MPI.Intracomm:
        """Calls a new rank in; returns the communicator of it and this rank."""
        new = next(new for new in self._new if new.at == self.number)
        self._new.remove(new)
        return new.call_in(self._gone, self._admitted + 1)

    def let_go(self, numbers: Iterable[int]) -> None:
        """Notes that these ranks have left in order."""
        self._gone |= frozenset(numbers)

    def begin(self, gone: frozenset[int], admitted: int) -> None:
        """Takes over, in a new rank, which ranks have left in order, and how many new ones were taken in."""
        self._gone, self._admitted = gone, admitted

    def note(self, *, admitted: bool) -> None:
        """Counts new ranks that were taken in, or were lost before that."""
        self._failures = 0 if admitted else self._failures + 1
        self._admitted += admitted

    def end(self) -> None:
        """Dismisses the new ranks that have not come in."""
        for new in self._new:
            new.dismiss()


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

    def wait(self, opening: int) -> tuple[MPI.Intracomm, frozenset[int], int] | None:
        """Waits in an opening; returns the communicator with the rank that has started this one, and the arguments of
        ``Admissions.begin``; or ``None``: pass by.

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
        return (self._pair, *answer) if answer else None

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
        MPI.Exception: one of them was lost, or, which comes to the same, MPI has not connected the new rank.
    """
    with _watched(members, pair, is_new=is_new):
        try:
            between = members.Create_intercomm(0, pair or members, 0 if is_new else 1, _JOIN)
            comm = MPI.Intracomm(between.Merge(high=is_new))
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            greet(comm, is_new=is_new)
        except MPI.Exception as error:
            raise MPI.Exception(MPI.ERR_PROC_FAILED) from error
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
