"""New ranks of an elastic job: rank 0 starts them in free slots, one by one; all take them in between two
collectives. All have the same *openings*, such as ``fit``; a new rank passes by one that is over, so it never runs
what follows the last. A lost one is replaced, a few times; if rank 0 is lost, its new processes leave::

    rank 0, in a thread     the new process                  all ranks
    Spawn ────────────────► MPI_Init
    ◄────── hello ───────── init()
    Merge ◄───────────────► Merge                            a communicator of these two
    ───── invitation ─────► the script runs as if all ranks did the same (local.py), until it
    ◄────── at(k) ───────── comes to the k-th opening; of one that is over it gets the facts since, and passes by
                                                             the agreement at the end of a collective tells all of it
    ────── come in ───────► Create_intercomm, Merge ◄──────► Create_intercomm, Merge
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Never, final

import numpy as np
from mpi4py import MPI

from choros import durations
from choros.comm.engines.mpi_survivors import revoke
from choros.comm.facts import Facts, learn_facts
from choros.errors import PeerLostError
from choros.settings import SESSION_BYTES, current
from choros.transport.gate import Gate
from choros.wording import bytes_text

_log = logging.getLogger("choros")

#: After so many processes in a row that were lost before they were taken in, no other is started.
_TRIES = 3
_HELLO, _AT, _ANSWER, _JOIN, _GREETING = range(5)
#: Open MPI's variable of the ways in which ranks reach each other.
_TRANSPORTS = "OMPI_MCA_btl"


def room(host: str) -> float:
    """How many new ranks of ``host`` may be on their way, if it has free slots; ``choros.ray`` sets it."""
    del host
    return math.inf


def meet_in_memory(environ: Mapping[str, str]) -> bool:
    """Whether ranks of one host reach each other through shared memory, as Open MPI's transports say.

    >>> [meet_in_memory({"OMPI_MCA_btl": transports}) for transports in ("", "^ofi,uct", "^sm", "self,tcp")]
    [True, True, False, False]
    """
    transports = environ.get(_TRANSPORTS, "")
    if not transports or transports.startswith("^"):
        return "sm" not in transports[1:].split(",")
    return "sm" in transports.split(",")


@final
class RankGate:
    """The gate before this rank's MPI, which listens for ranks that join later: open only while one connects. MPI
    connects two ranks at the first message: so each sends one to a new rank before the gate closes (``_greet``).
    ``sockets``: by their numbers; none in jobs on several hosts, or where ranks cannot use shared memory::

        init() ─► closed ─► a new rank is started, or taken in ─► open ─► all are connected ─► closed
                                                                   │
                                              connections of other users are ended within milliseconds
    """

    def __init__(self, sockets: Iterable[int] = ()) -> None:
        self._gate = Gate(os.getpid(), sockets=sockets)
        self._lock = threading.Lock()
        self._open = 0
        self._closed = threading.Event()
        self._close()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which the gate is open; several threads may be in it."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._gate.open()
                self._closed.clear()
                threading.Thread(target=self._watch, name="choros: gate", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._close()

    def _close(self) -> None:
        self._closed.set()
        self._gate.close()
        self._gate.expel()

    def _watch(self) -> None:
        closed = self._closed
        while not closed.wait(durations.GATE_WATCH):
            self._gate.expel()


@dataclass(frozen=True)
class RankSlots:
    """Where the ranks of a job may be, as the launcher numbers them; the first ``size`` slots are those of the start.

    >>> slots = RankSlots(3, ("a", "a", "b", "b"))
    >>> slots.leaders, slots.known_to(1), slots.known_to(3)
    ((0, 0, 2, 2), (0, 0, 2), (0, 0, 2, 2))
    """

    size: int
    hosts: tuple[str, ...]

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """Of each slot the first one on its host."""
        return tuple(map(self.hosts.index, self.hosts))

    def free(self, taken: Container[int], present: Sequence[int], *, far: bool) -> int | None:
        """A free slot on a host with ranks, as Open MPI starts none elsewhere; ``far``: not only the first's."""
        leaders = {self.leaders[each] for each in (present if far else present[:1])}
        free = (slot for slot in range(len(self.hosts)) if slot not in taken)
        return next((slot for slot in free if self.leaders[slot] in leaders), None)

    def known_to(self, number: int) -> tuple[int, ...]:
        """Returns the leaders of all ranks that a new one takes to exist: those of the start, itself, another one."""
        return self.leaders[: max(self.size, number + 1, 2)]


class _NewRank:
    """A process that rank 0 has started, until it is taken in: the opening it waits ``at``, or its ``problem``. It is
    invited with its ``number`` at the launcher, where ranks may be, and what they have sent each other.
    """

    def __init__(
        self, number: int, slots: RankSlots, facts: Facts, since: Callable[[int, int], Facts | None], gate: RankGate
    ) -> None:
        """``since``: once an opening is over, the facts after the first few."""
        self.number = number
        self._slots, self._facts = slots, facts
        self.at: int | None = None
        self.problem = ""
        self._since = since
        self._gate = gate
        self._pair: MPI.Intracomm | None = None
        self._overdue = time.monotonic() + current().start_timeout
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
        """Calls the process in, with what its ``Admissions`` begin with; returns the communicator with it."""
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
            pair.send((self.number, self._slots, self._facts), 1, _ANSWER)
            if self._stopped.is_set():  # given up
                pair.send(None, 1, _ANSWER)
            self._pair, known = pair, len(self._facts)
            while not self._stopped.wait(durations.ADMISSION_LOOK):
                _check(pair)
                if pair.Iprobe(1, _AT):
                    self.at = pair.recv(source=1, tag=_AT)
                if self.at is not None and (facts := self._since(self.at, known)) is not None:
                    self.at, known = None, known + len(facts)
                    pair.send(facts, 1, _ANSWER)
        except MPI.Exception as error:
            self.problem = error.Get_error_string()

    def _meet(self) -> MPI.Intracomm:
        number, slots = self.number, self._slots
        new_rank = ",".join(map(str, (number, *slots.known_to(number))))
        command = [each.replace("{new_rank}", new_rank) for each in json.loads(current().spawn)]
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
    """The openings of this job, and the new ranks that are under way, which receive the facts."""

    def __init__(self, slots: RankSlots, facts: Facts, gate: RankGate) -> None:
        self.number = 0
        self._slots, self._facts, self._gate = slots, facts, gate
        #: The ranks that have left in order, and how many new ones were taken in; others tell a new rank.
        self.gone = frozenset[int]()
        self.admitted = 0
        limit = current().reset_limit
        self._limit = sys.maxsize if limit is None else limit
        self._open = False
        self._new: list[_NewRank] = []
        self._failures = 0
        #: Whether this rank has started one on another host. Open MPI does not connect it to a second one.
        self._has_far = False
        self._warned = False

    @property
    def may_grow(self) -> bool:
        """Whether new ranks may be started though none is lost; the same on all ranks."""
        return len(self._slots.hosts) > self._slots.size

    @contextmanager
    def opening(self) -> Iterator[None]:
        """An opening; all ranks enter it at the same place of the program."""
        self.number, self._open = self.number + 1, True
        try:
            yield
        finally:
            self._open = False

    def is_someone_ready(self, launched: Sequence[int]) -> bool:
        """Whether a new rank waits to be taken in; starts one if a slot is free. Rank 0 calls it."""
        if len(launched) + len(self.gone) >= len(self._slots.hosts) or not self._open or not current().spawn:
            return False
        for new in self._new:
            new.check()
            if new.problem:
                self._failures += 1
                if self._failures == _TRIES:
                    _log.warning("no further rank is started: %d have ended before they could join.", _TRIES)
        self._new = [new for new in self._new if not new.problem]
        may_start = all(new.is_connected for new in self._new) and self._failures < _TRIES
        if may_start and self.admitted + len(self._new) < self._limit:
            taken = {*launched, *self.gone, *(new.number for new in self._new)}
            number = self._slots.free(taken, launched, far=not self._has_far)
            if number is not None and self._may_come(number) and self._has_room():
                leaders = self._slots.leaders
                self._has_far = self._has_far or leaders[number] != leaders[launched[0]]
                new = _NewRank(number, self._slots, list(self._facts), self._facts_since, self._gate)
                self._new.append(new)
        return any(new.at == self.number for new in self._new)

    def _facts_since(self, opening: int, known: int) -> Facts | None:
        return list(self._facts[known:]) if opening < self.number else None

    def _may_come(self, number: int) -> bool:
        hosts = self._slots.hosts
        coming = sum(new.at is None and hosts[new.number] == hosts[number] for new in self._new)
        return coming < room(hosts[number])

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
                "no new rank is started: %s has less than %s left. The job goes on with fewer ranks until there is "
                "room.",
                directory,
                bytes_text(SESSION_BYTES),
            )
        return has_room

    def call_in(self) -> MPI.Intracomm:
        """Calls a new rank in; returns the communicator of it and this rank."""
        new = next(new for new in self._new if new.at == self.number)
        self._new.remove(new)
        return new.call_in(self.gone, self.admitted + 1)

    def note(self, *, admitted: bool) -> None:
        """Counts new ranks that were taken in, or were lost before that."""
        self._failures = 0 if admitted else self._failures + 1
        self.admitted += admitted

    def end(self) -> None:
        """Dismisses the new ranks that have not come in."""
        for new in self._new:
            new.dismiss()


@final
class Entrance:
    """How this process, which a rank has started, becomes rank ``number``; ``parent``: the communicator of the two."""

    def __init__(self, parent: MPI.Intercomm) -> None:
        parent.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            parent.send(None, 0, _HELLO)
            self._pair = MPI.Intracomm(parent.Merge(high=True))
            self._pair.Set_errhandler(MPI.ERRORS_RETURN)
            self.number, self.slots, facts = _received(self._pair, _ANSWER)
        except MPI.Exception as error:
            self._leave(error)
        learn_facts(facts)

    def wait(self, opening: int) -> tuple[MPI.Intracomm, frozenset[int], int] | None:
        """Waits in an opening; returns the communicator with the rank that has started this one, and what its
        ``Admissions`` begin with; or ``None``: pass by. ``SystemExit`` if this process is not needed any more.
        """
        try:
            self._pair.send(opening, 0, _AT)
            answer = _received(self._pair, _ANSWER)
        except MPI.Exception as error:
            self._leave(error)
        if answer is None:
            self._leave("the others have ended")
        if isinstance(answer, list):
            learn_facts(answer)
            return None
        return (self._pair, *answer)

    def _leave(self, reason: object) -> Never:
        _log.info("this process was to become a rank, but is not needed any more: %s.", reason)
        sys.exit(0)


def joined(members: MPI.Intracomm, pair: MPI.Intracomm | None, *, is_new: bool) -> MPI.Intracomm:
    """The communicator of the members and, last, a new rank; an error if one was lost, or MPI has not connected it."""
    with _watched(members, pair, is_new=is_new):
        try:
            between = members.Create_intercomm(0, pair or members, 0 if is_new else 1, _JOIN)
            comm = MPI.Intracomm(between.Merge(high=is_new))
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            _greet(comm, is_new=is_new)
        except MPI.Exception as error:
            raise MPI.Exception(MPI.ERR_PROC_FAILED) from error
        return comm


def _greet(comm: MPI.Intracomm, *, is_new: bool) -> None:
    """Connects the last member of ``comm``, which is new, with all others; all members call it."""
    last, nothing = comm.Get_size() - 1, np.empty(0, np.int8)
    try:
        for other in range(last) if is_new else [last]:
            comm.Sendrecv(nothing, other, _GREETING, nothing, other, _GREETING)
    except MPI.Exception:
        revoke(comm)  # those who wait for this one do not wait for ever
        raise


@contextmanager
def _watched(members: MPI.Intracomm, pair: MPI.Intracomm | None, *, is_new: bool) -> Iterator[None]:
    """Open MPI does not tell the members that the process which they connect to is lost: this thread does. Nor does it
    end a Merge from which one is lost: a process that waits there cannot go on, and ends itself.
    """
    done, started, lost_at = threading.Event(), time.monotonic(), math.inf
    comms = [members] if pair is None else [members, pair]

    def watch() -> None:
        nonlocal lost_at
        while not done.wait(durations.ADMISSION_LOOK):
            now = time.monotonic()
            if is_new and now - started > durations.JOIN:
                _log.error("this rank is new, and was not taken in by the others within %g s: it ends.", durations.JOIN)
                os._exit(1)
            if now - lost_at > durations.ADMISSION:
                _log.error("a rank was lost while MPI connected a new one, and MPI waits for it: this rank ends.")
                os._exit(PeerLostError.exit_code)
            # Another member that has noticed it has revoked them.
            if lost_at == math.inf and any(comm.Get_failed().Get_size() or comm.Is_revoked() for comm in comms):
                lost_at = now
                revoke(*comms)

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
        time.sleep(durations.ADMISSION_LOOK)
        _check(comm)
    return comm.recv(source=0, tag=tag)


def _check(comm: MPI.Comm) -> None:
    if comm.Get_failed().Get_size():
        raise MPI.Exception(MPI.ERR_PROC_FAILED)
