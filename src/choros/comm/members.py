"""The members of a communicator: they agree before data moves, complete it all or none, are lost, and admitted."""

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from choros.comm.primitives import Change, Primitives
from choros.comm.reduction import Array, Reduction
from choros.comm.request import (
    JOINED,
    SHUTDOWN,
    CollectiveSpec,
    Request,
    caller,
    digest_of,
    is_served,
    mismatch_text,
)
from choros.comm.waiting import Reporter, sleep_after
from choros.comm.work import Gathered, WorkQueue
from choros.errors import ChorosError, EngineError, MismatchError, PeerLostError
from choros.observe import events
from choros.observe.progress import page

T = TypeVar("T")

#: The notice of a rank which knows that the job was asked to end: all ranks end after this step.
END = 1
#: The notice of rank 0 that a new rank waits for ``admit``.
NEWCOMER = 2
#: The notice of a rank that leaves after this step, in order: it is not replaced.
LEAVES = 4
#: What a rank that has joined knows of the others' request: nothing, nothing but how to learn it, or all.
UNKNOWN, LEARNS, KNOWN = range(3)
#: What a rank serves is kept for others that ask for it later: for so many steps.
KEPT_STEPS = 64

_ADMISSION = Request("admission")
#: What is said of a script that has ended while others go on in an elastic job.
_LEFT = " They go on without one that raises an exception, not without one whose script ends, as by sys.exit()."


class MemberLost(PeerLostError):
    """An elastic engine's primitive has failed, because a member was lost; ``Members.atomic`` handles it."""


class _LostWhileServed(MemberLost):
    """So did another rank's request, which all members have settled."""


class Members(Primitives):
    """What collectives are made of: agreement of all members, before data moves and after it, and moves that count.

    Attributes:
        scratch: the memory in which chunks are packed.
        kept: what this rank serves in its last steps, also if its script has no reference to it any more.
        not_joined: the members that had not joined at the last collective, if others had, as the launcher numbers them.
    """

    def __init__(self, rank: int, launched: Sequence[int]) -> None:
        super().__init__(rank, launched)
        self.scratch: NDArray[np.uint8] | None = None
        self.not_joined: tuple[int, ...] = ()
        self._queue = WorkQueue()
        self._section = self._queue.section
        self._when_settled: list[Callable[[], None]] = []
        #: Whether others serve the present unit, wherever they are: what is noticed then is noticed with the next one.
        self._is_served = False
        self._served: dict[int, weakref.WeakMethod[Callable[[int], object]]] = {}
        self.kept: deque[object] = deque(maxlen=KEPT_STEPS)
        #: Why this rank cannot communicate any more.
        self._over = ""
        #: The error of this rank that the others know.
        self._problem: Exception | None = None

    # ── all or none ──────────────────────────────────────────────────────────────────────────────

    @final
    def exclusive(self) -> AbstractContextManager[None]:
        """A context in which no other collective of this communicator runs; see ``WorkQueue.exclusive``."""
        return self._queue.exclusive()

    @final
    def atomic(self, collective: Callable[[], T], *, again: Callable[[], None] | None = None) -> T:
        """Runs ``collective``, which calls ``agree`` and then moves data, on all members or on none; or as part of an
        outer call. If one is lost, an elastic engine calls ``again`` and runs it again (``raises_loss``: raises). It
        must not change its input, and must read ``rank``, ``size`` and plans itself::

                       rank 0                rank 1                rank 2                 rank 1 of 2
            agree      all are here          all are here          all are here
            data       received              killed                PeerLostError
            settle     no: one was lost ◄──────────────────────►   no: one was lost       the same answer on all
            recover    shrinks                                     shrinks; is rank 1 now
            again      agree, data, settle: yes ◄──────────────►   agree, data, settle: yes
        """
        with self._queue.exclusive():
            try:
                if not self.elastic or self._section.in_unit:
                    return collective()
                first = True
                while True:
                    self._section.in_unit = True
                    try:
                        results = self._attempt(collective, first=first)
                    finally:
                        self._section.in_unit = False
                    if results:
                        return results[0]
                    first = False
                    if again is not None:
                        again()
            except KeyboardInterrupt:
                if self._section.has_turn and self.size > 1:
                    self._break_off(self._asked)
                raise

    def _attempt(self, collective: Callable[[], T], *, first: bool) -> tuple[T, ...]:
        """Runs a collective; returns its result, or nothing if a member was lost, without which all others go on. An
        error that only this member has is taken for a loss, too: what is received from one that is lost may be
        anything, and cannot be decoded. It is raised if no rank is missing and it is not the ``first`` attempt.
        """
        error: Exception | None = None
        noticed, self._is_served = self.noticed, False
        try:
            result = collective()
        except Exception as raised:  # noqa: BLE001
            error = raised
        is_shared = (
            error is None
            or error is self._problem
            or (isinstance(error, ChorosError) and not isinstance(error, MemberLost))
        )
        self._problem = None
        settled = not isinstance(error, _LostWhileServed) and self._settle(completed=is_shared)
        if self._is_served:
            self.noticed = noticed
        actions, self._when_settled = self._when_settled, []
        if settled:
            self._section.in_unit = False  # an action may be an update, with collectives that are settled themselves
            for action in actions:
                action()
            if error is not None:
                raise error
            return (result,)
        self._queue.abandon_plan()
        before, too_few = self.launched, None
        try:
            with page.counted_as("recovered"):
                self._recover()
        except PeerLostError as raised:
            if self.launched == before:
                raise
            too_few = raised
        self._section.end()
        self.scratch = None
        if self.launched == before:
            if first or error is None or isinstance(error, MemberLost):
                return ()
            raise error
        change = Change.between(before, self.launched, ends_job=too_few is not None)
        if self.on_change is not None:
            self.on_change(change)
        if too_few is not None:
            raise too_few
        if self.raises_loss:
            raise PeerLostError(f"{self._asked}: {change}.", ranks=change.lost)
        return ()

    @final
    def when_settled(self, action: Callable[[], None]) -> None:
        """Calls ``action`` once the caller's ``atomic`` collective ended on all ranks, not if run again; else now."""
        if self.elastic and self._section.in_unit:
            self._when_settled.append(action)
        else:
            action()

    @final
    def admit(self) -> bool:
        """Makes the process that waits the last member, unless it was lost; all call it, between two collectives."""
        self.agree(_ADMISSION)  # a rank that saves alone is served before
        with self._queue.exclusive():
            before, noticed, self.noticed = self.launched, self.noticed, 0
            if not (noticed & NEWCOMER and self._admit()):  # it may have ended since all noticed it
                return False
            self.scratch = None
            if self.on_change is not None:
                self.on_change(Change.between(before, self.launched))
            return True

    @final
    def first_left(self, launched: Sequence[int], what: str) -> int:
        """The present rank of the first of ``launched`` that was not lost; ``what`` they are, for the error."""
        left = next((each for each in launched if each in self.launched), None)
        if left is None:
            raise PeerLostError(
                f"{what}, rank {launched[0]} at the start of the job, was lost, and no other rank has its values: "
                "start the job again, from its last commit. A function of hvd.elastic.run goes on by itself."
            )
        return self.launched.index(left)

    # ── agreement ────────────────────────────────────────────────────────────────────────────────

    @final
    def agree(self, request: Request, *, value: int = 0, problem: Exception | None = None) -> list[int]:
        """The check before data moves, one control message; returns the ranks' values, 0 of those that have joined. A
        ``problem`` is raised here; other ranks, which cannot go on without this one, get a ``MismatchError``, no hang.
        Outside of ``atomic`` it is a collective of its own.
        """
        section = self._section
        if section.owner != threading.get_ident() or (self.elastic and not section.in_unit):
            return self.atomic(lambda: self.agree(request, value=value, problem=problem))
        if problem is not None:
            request = Request(request.collective, f"refused: {problem}", request.name)
        digests, values = self.gather(request, value)
        self._problem, self._is_served = problem, self._is_served or request.served
        if digests.count(request.digest) == self.size or request.served:
            if problem is not None:
                raise problem
            if not request.served:  # which also ranks that have joined serve
                self.not_joined = ()
        elif self.explain_to_joined(request, digests) is None:
            mismatch = self.mismatch(request, digests)
            raise problem or mismatch
        elif request.spec is not None and request.spec.root is not None and digests[request.spec.root] == JOINED.digest:
            sender = self.ranks[request.spec.root]
            raise MismatchError(f"{request}: rank {sender}, which would send, has joined, and has no values any more.")
        return values

    @final
    def gather(self, request: Request, value: int) -> Gathered:
        """The control message, when it is this request's turn: returns all ranks' digests, and their values."""
        name = None if request is JOINED else request.name
        header = np.array((request.digest, value), np.int64)
        sent = self.bytes_sent
        note_match = self._observe(request) if events.Kind.COLLECTIVE_BEGUN in events.heard else None
        try:
            while True:
                has_turn = self._section.has_turn
                gathered = self._queue.take_turn(name, request, header, self._control_message, self._make_plan)
                is_same = not request.served and gathered[0].count(request.digest) == self.size
                if is_same or not any(map(is_served, gathered[0])) or self._is_answered(request, value, gathered):
                    break
                self._section.has_turn = has_turn
        except ChorosError:
            raise
        except BaseException as error:
            # What is received from a lost rank may be anything, such as lengths beyond all memory: see ``_attempt``.
            if not (self.elastic and self._section.in_unit and isinstance(error, Exception)):
                self._break_off(request)
            raise
        if note_match is None:
            self._section.on_exit(partial(self._done, request.collective, sent))
        else:
            note_match()
        self.collectives += 1
        page.begin_collective(request.label, self.size, hidden=self._queue.in_background)
        return gathered

    @final
    def serve(self, request: Request, part: Callable[[int], object]) -> None:
        """Lets other ranks make a ``served`` request alone. Whenever this one asks for anything else, or ends, it first
        does its ``part``, given their value; until the object is gone of which that is a method::

            rank 0                      rank 1
            agree(state, value=3)       agree(gradients)         one asks for what the others serve
            knows it                    knows it                 another control message
            its part of state 3         its part of state 3      data moves
            settle                      settle                   in elastic jobs
            agree(gradients)            agree(gradients)         asked again
        """
        self._served[request.digest] = weakref.WeakMethod(part, lambda _: self._served.pop(request.digest, None))

    def _is_answered(self, request: Request, value: int, gathered: Gathered) -> bool:
        """Serves the first rank that asks for what the others serve; returns whether that is this request."""
        digests, values = gathered
        first = next(rank for rank, digest in enumerate(digests) if is_served(digest))
        wanted = digests[first], values[first]
        own = wanted == (request.digest, value)
        if all(each == wanted for each in zip(digests, values, strict=True)):
            return True
        served = self._served.get(wanted[0])
        part = None if served is None else served()
        known, _ = self._control_message(request, np.array((part is not None, 0), np.int64))
        if own and not all(known):
            lacking = [rank for rank, each in zip(self.ranks, known, strict=True) if not each]
            raise MismatchError(
                f"{request}: rank {lacking[0]} has no such state: it has not built this optimizer, or another one."
            )
        if not own:
            if all(known) and part is not None:
                part(wanted[1])
            noticed = self.noticed
            if self.elastic and not self._settle(completed=True):
                raise _LostWhileServed(f"{self._asked}: a rank was lost while another one's request was served.")
            self.noticed = noticed
        return own

    def _done(self, collective: str, sent: int) -> None:
        """Notes the end of a collective, before which this rank had sent so many bytes."""
        page.end_collective(collective, self.bytes_sent - sent)

    def _observe(self, request: Request) -> Callable[[], None]:
        """Emits an event now, one when what it returns is called, and one when the collective is done."""
        name, sent, begun = request.name or request.collective, self.bytes_sent, time.perf_counter()

        def emit(kind: events.Kind, **details: events.Detail) -> None:
            events.emit(kind, name, collective=request.collective, process_set=self.ranks, **details)

        def done() -> None:
            self._done(request.collective, sent)
            seconds = round(time.perf_counter() - begun, 6)
            emit(events.Kind.COLLECTIVE_DONE, bytes=self.bytes_sent - sent, seconds=seconds)

        def matched() -> None:
            waited = round(time.perf_counter() - begun, 6)
            emit(events.Kind.COLLECTIVE_MATCHED, number=self.collectives, waited=waited)

        self._queue.section.on_exit(done)
        emit(events.Kind.COLLECTIVE_BEGUN)
        return matched

    def _make_plan(self, request: Request) -> None:
        """Agrees with the other ranks on which collectives are next, when they ask for them in different orders; those
        that have joined take part in any. Rounds are a tenth of the time waited apart. If no name is common, and all
        threads that could ask for more wait, all report a mismatch. Those without a name are matched by order::

            rank 0                          rank 1
            proposes a                      proposes b              one control message: they differ
            offers a                        offers b                no name is common; rank 0's program still computes
            offers a, b                     offers b                b is common: the plan of both
            b                               b
            proposes a                      proposes a              the same again: one control message
        """
        table: Gathered | None = None
        with Reporter(self._long_wait) as reporter:
            while True:
                message = json.dumps(self._queue.asked_for()).encode()
                header = np.array((digest_of(message), len(message)), np.int64)
                earlier, table = table, self._control_message(request, header)
                if table != earlier:
                    asked, joined, are_complete = zip(*map(json.loads, self._share(message, table[1])), strict=True)
                    self._queue.plan.extend(matched(asked, joined))
                    if self._queue.plan:
                        return
                    if all(are_complete):
                        raise self.mismatch(request)
                self._section.give_up(self._section.version, sleep_after(reporter.check(), longest=10e-3))

    def _control_message(self, request: Request, header: NDArray[np.int64]) -> Gathered:
        """Gathers both numbers of the ranks' headers, once all ranks are here."""
        if self._over:
            raise MismatchError(self._over)
        self._asked = request
        try:
            # Plain integers: this runs in every step, and for some ranks they are compared faster than arrays.
            first, second = self._exchange(header).T.tolist()
        except EngineError:
            raise
        except BaseException:
            self._break_off(request)
            raise
        return first, second

    def _break_off(self, request: Request) -> None:
        """After Ctrl-C, or a signal's handler."""
        # The other ranks consider this request made, and wait for its data.
        self._over = f"{request} was interrupted on this rank, which cannot communicate any more."
        self._queue.abandon_plan()

    def _share(self, message: bytes, lengths: Sequence[int]) -> list[bytes]:
        together = self._allgather(np.frombuffer(message, np.uint8), lengths)
        return [part.tobytes() for part in np.split(together, np.cumsum(lengths)[:-1])]

    @final
    def mismatch(self, request: Request, digests: Sequence[int] = ()) -> MismatchError:
        """The error that compares the ranks' requests; all members make it, and tell the others their requests."""
        location = caller() or ("" if request == SHUTDOWN else "unknown location")
        mine = (f"{request} at {location}" if location else str(request)).encode()
        lengths = self._exchange(np.array([len(mine), 0], np.int64))[:, 0].tolist()
        comparison = mismatch_text([each.decode() for each in self._share(mine, lengths)], self.ranks)
        if SHUTDOWN.digest in digests:
            comparison += _LEFT if self.elastic else ""
            # A rank has left: to wait for it again would take forever.
            self._over = comparison
        return MismatchError(comparison)

    @final
    def explain_to_joined(
        self, request: Request, digests: Sequence[int], *, knows: int = KNOWN
    ) -> CollectiveSpec | bytes | None:
        """What ranks that have joined need to know of the others' one request, to take part: nothing if they know it;
        ``None`` if none has joined, or one cannot. All ask. Only a joined rank knows what it knows: so another control
        message. If one does not, the first that has not joined sends a spec, or an explanation, with its length as a
        negative number, and signed if connections need it.
        """
        if JOINED.digest not in digests or len({*digests}) > 2:
            return None
        asking = [rank for rank, digest in enumerate(digests) if digest != JOINED.digest]
        self.when_settled(partial(setattr, self, "not_joined", tuple(self.launched[rank] for rank in asking)))
        message, sign = b"" if request.spec is None else request.spec.encode(), 1
        if request.explain is not None:
            message, sign = request.explain(), -1
            message = self.signatures.sign(message, collective=self.collectives, rank=self.rank)
        known, lengths = self._control_message(request, np.array((knows, sign * len(message)), np.int64))
        if {*known} == {KNOWN}:
            return b""
        sender, length = asking[0], lengths[asking[0]]
        if length == 0 or (length < 0 and UNKNOWN in known):
            return None
        sent = [abs(length) if rank == sender else 0 for rank in range(self.size)]
        explanation = self._share(message if self.rank == sender else b"", sent)[sender]
        if length > 0:
            return CollectiveSpec.decode(explanation)
        return self.signatures.verified(explanation, collective=self.collectives, rank=sender)

    # ── moves: unchecked, in ``exclusive()``, after ``agree`` ─────────────────────────────────────

    @final
    def reduce_in_place(self, buffer: Array, op: Reduction) -> None:
        """Reduces a buffer of an engine's dtype, not by ``AVERAGE``; unchecked."""
        self.bytes_sent += buffer.nbytes
        self._allreduce(buffer, op)

    @final
    def message(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory from ``_allocate`` for one message, of the same size on all members, until the next one."""
        if self.scratch is None or self.scratch.nbytes < max(nbytes, self.chunk_bytes):  # chunks have become larger
            self.scratch = self._allocate(max(nbytes, self.chunk_bytes))
        return self.scratch[:nbytes]

    @final
    def gather_bytes(self, send: NDArray[np.uint8], counts: Sequence[int]) -> NDArray[np.uint8]:
        """Concatenates the ranks' bytes; unchecked."""
        self.bytes_sent += send.nbytes
        return self._allgather(send, counts)

    @final
    def gather_in_place(self, flat: Array, counts: Sequence[int]) -> None:
        """Gives all ranks the items of ``flat`` that each has: the first ``counts[0]`` rank 0, and so on; unchecked."""
        width = flat.itemsize
        self.bytes_sent += counts[self.rank] * width
        self._allgather_into(flat.view(np.uint8), [count * width for count in counts])

    @final
    def alltoallv_bytes(
        self, send: NDArray[np.uint8], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> NDArray[np.uint8]:
        """Sends ``send_counts[i]`` bytes to rank ``i``; unchecked."""
        self.bytes_sent += send.nbytes
        return self._alltoall(send, send_counts, receive_counts)


def matched(asked: Sequence[list[str]], joined: Sequence[bool]) -> list[str]:
    """Returns the names that all ranks wait for, in the order of the first; those that have joined take any.

    >>> matched([["a", "b", "c"], ["c", "b"]], [False, False]), matched([["a"], ["a", "b"]], [True, False])
    (['b', 'c'], ['a', 'b'])
    """
    offers = list(zip(asked, joined, strict=True))
    return [name for name in dict.fromkeys(chain(*asked)) if all(takes_any or name in own for own, takes_any in offers)]
