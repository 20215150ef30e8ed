"""The members of a communicator: they agree before data moves, complete it all or none, are lost, and admitted."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar, final

from choros.comm.joining import Joining
from choros.comm.matching import Matching
from choros.comm.membership import Change
from choros.comm.primitives import Moves
from choros.comm.request import Request
from choros.errors import ChorosError, PeerLostError

T = TypeVar("T")

#: The notice of a rank which knows that the job was asked to end: all ranks end after this step.
END = 1
#: The notice of rank 0 that a new rank waits for ``admit``.
NEWCOMER = 2
#: The notice of a rank that leaves after this step, in order: it is not replaced.
LEAVES = 4


class MemberLost(PeerLostError):
    """An elastic engine's primitive has failed, because a member was lost; ``Members.atomic`` handles it."""


class Members(Moves):
    """What collectives are made of: agreement of all members, before the moves of data and after them."""

    def __init__(self, rank: int, launched: Sequence[int]) -> None:
        super().__init__(rank, launched)
        self._matching = Matching(self)
        self._queue = self._matching.queue
        self._section = self._queue.section
        self._joining = Joining(self, self._matching, self.when_settled)
        self._when_settled: list[Callable[[], None]] = []

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
            if not self.elastic or self._section.in_unit:
                return collective()
            while True:
                self._section.in_unit = True
                try:
                    results = self._attempt(collective)
                finally:
                    self._section.in_unit = False
                if results:
                    return results[0]
                if again is not None:
                    again()

    def _attempt(self, collective: Callable[[], T]) -> tuple[T, ...]:
        """Runs a collective; returns its result, or nothing if a member was lost, without which all others go on."""
        error: ChorosError | None = None
        try:
            result = collective()
        except ChorosError as raised:
            error = raised
        settled = self._settle(completed=not isinstance(error, MemberLost))
        actions, self._when_settled = self._when_settled, []
        if settled:
            for action in actions:
                action()
            if error is not None:
                raise error
            return (result,)
        self._queue.abandon_plan()
        before, too_few = self.launched, None
        try:
            self._recover()
        except PeerLostError as raised:
            if self.launched == before:
                raise
            too_few = raised
        self._section.end()
        self._section.has_turn = False  # the collective has another one when it is run again
        self.scratch = None
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
        with self._queue.exclusive():
            before, self.noticed = self.launched, 0
            if not self._admit():
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

    @final
    def agree(self, request: Request, *, value: int = 0, problem: Exception | None = None) -> list[int]:
        """The check before data moves, one control message; returns the ranks' values. A ``problem`` is raised here;
        other ranks, which cannot continue without this one, get a ``MismatchError`` instead of a hang.
        """
        if problem is not None:
            request = Request(request.collective, f"refused: {problem}", request.name)
        digests, values = self._matching.gather(request, value)
        if digests.count(request.digest) == self.size:
            if problem is not None:
                raise problem
            self._joining.not_joined = ()
            return values
        if self._joining.joined_ranks_take_part(request, digests):
            self._joining.check_root(request, digests)
            return values  # 0 of those that have joined
        mismatch = self._matching.mismatch(request, digests)
        raise problem or mismatch

    @final
    def join(
        self,
        requests: Callable[[], Sequence[Request]],
        take_part: Callable[[Request, list[int]], None],
        learn: Callable[[bytes], Sequence[Request]] | None = None,
    ) -> None:
        """Participates in what the other ranks request, without data, until all have joined; sets ``last_joined``.
        Collectives of this class get zeros, or no rows; what else is not in ``requests`` the first rank that has not
        joined sends once, to ``learn``, or all get a ``MismatchError``. ``take_part`` follows the control message::

            rank 0                 rank 1                 rank 2, which has joined
            agree(a, value=8)      agree(a, value=3)      take_part(a, [8, 3, 0])          it does its part of a
            allgather(rows)        allgather(rows)                                         gives no rows, by itself
            agree(b, value=8)      take_part(b, [8, 0, 0])  take_part(b, [8, 0, 0])        both do their part of b
            join                   join                   join                             all have joined
        """
        while not self.atomic(functools.partial(self._joining.join_once, requests, take_part, learn)):
            pass
        self.last_joined, self._joining.not_joined = self._joining.not_joined, ()
