"""Matching: which collective is next, when ranks ask for them in different orders; ranks that joined take part in
any. Rounds are a tenth of the time waited apart, at most 10 ms. If no name is common, and all threads that could
ask for more wait, all report a mismatch. Those without a name are matched by order of calls, Horovod's rule::

    rank 0                          rank 1
    proposes a                      proposes b              one control message: they differ
    offers a                        offers b                no name is common; rank 0's program still computes
    offers a, b                     offers b                b is common: the plan of both
    b                               b
    proposes a                      proposes a              the same again: one control message
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from choros.comm.primitives import Primitives
from choros.comm.request import JOINED, SHUTDOWN, Request, caller, digest_of, mismatch_text
from choros.comm.waiting import Reporter, Schedule
from choros.comm.work import Gathered, WorkQueue
from choros.errors import ChorosError, EngineError, MismatchError
from choros.observe import events
from choros.observe.progress import page

#: When ranks that have asked for different collectives tell each other again what they wait for.
_ROUNDS = Schedule(longest_sleep=10e-3)


class Offer(NamedTuple):
    """What a rank waits for, ``""`` being the first without a name; ``complete``: it asks no more before one is done.

    >>> Offer.decode(Offer(["a", ""], complete=True).encode())
    Offer(names=['a', ''], complete=True, joined=False)
    """

    names: list[str]
    complete: bool
    joined: bool = False

    def encode(self) -> bytes:
        """Returns the offer as a message."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, message: bytes) -> Offer:
        """Returns the offer of a message."""
        return cls(*json.loads(message))


def matched(offers: Sequence[Offer]) -> list[str]:
    """Returns the names that all ranks wait for, in the order of the first rank that has not joined.

    >>> matched([Offer(["a", "b", "c"], complete=False), Offer(["c", "b"], complete=True)])
    ['b', 'c']
    >>> matched([Offer([], complete=True, joined=True), Offer(["a"], complete=True)])
    ['a']
    """
    asking = [offer.names for offer in offers if not offer.joined]
    return [name for name in asking[0] if all(name in names for names in asking)] if asking else []


@final
class Matching:
    """Finds out, with the other ``members``, which collective is next; ``queue`` has those of this rank."""

    def __init__(self, members: Primitives) -> None:
        self.queue = WorkQueue()
        self._members = members
        self._over = ""

    def gather(self, request: Request, value: int) -> Gathered:
        """The control message, when it is this request's turn: returns all ranks' digests, and their values."""
        name = None if request is JOINED else request.name
        header = np.array((request.digest, value), np.int64)
        try:
            note_match = self._observe(request) if events.active() else None
            gathered = self.queue.take_turn(name, request, header, self.control_message, self._make_plan)
        except ChorosError:
            raise
        except BaseException:
            self._break_off(request)
            raise
        if note_match is None:
            self.queue.section.on_exit(page.end_collective)
        else:
            note_match()
        self._members.collectives += 1
        page.begin_collective(request.label, self._members.size)
        return gathered

    def _observe(self, request: Request) -> Callable[[], None]:
        """Emits an event now, one when what it returns is called, and one when the collective is done."""
        name, sent, begun = request.name or request.collective, self._members.bytes_sent, time.perf_counter()

        def emit(kind: events.Kind, **details: events.Detail) -> None:
            events.emit(kind, name, collective=request.collective, process_set=self._members.ranks, **details)

        def done() -> None:
            page.end_collective()
            seconds = round(time.perf_counter() - begun, 6)
            emit(events.Kind.COLLECTIVE_DONE, bytes=self._members.bytes_sent - sent, seconds=seconds)

        def matched() -> None:
            waited = round(time.perf_counter() - begun, 6)
            emit(events.Kind.COLLECTIVE_MATCHED, number=self._members.collectives, waited=waited)

        self.queue.section.on_exit(done)
        emit(events.Kind.COLLECTIVE_BEGUN)
        return matched

    def _make_plan(self, request: Request) -> None:
        """Agrees with the other ranks on which collectives are next; see ``matching.py``."""
        section = self.queue.section
        table: Gathered | None = None
        with Reporter(self._members._long_wait) as reporter:
            while True:
                message = Offer(*self.queue.asked_for()).encode()
                header = np.array((digest_of(message), len(message)), np.int64)
                earlier, table = table, self.control_message(request, header)
                if table != earlier:
                    offers = [Offer.decode(each) for each in self.share(message, table[1])]
                    self.queue.plan.extend(matched(offers))
                    if self.queue.plan:
                        return
                    if all(offer.complete for offer in offers):
                        raise MismatchError(self.compare(request))
                section.give_up(section.version, _ROUNDS.sleep_after(reporter.check()))

    def control_message(self, request: Request, header: NDArray[np.int64]) -> Gathered:
        """Gathers both numbers of the ranks' headers, once all ranks are here."""
        if self._over:
            raise MismatchError(self._over)
        self._members._asked = request
        try:
            # Plain integers: this runs in every step, and for some ranks they are compared faster than arrays.
            first, second = self._members._exchange(header).T.tolist()
        except EngineError:
            raise
        except BaseException:
            self._break_off(request)
            raise
        return first, second

    def _break_off(self, request: Request) -> None:
        """After Ctrl-C, or a signal's handler."""
        # The other ranks consider this request made, and would wait for its data.
        self._over = f"{request} was interrupted on this rank, which cannot communicate any more."
        self.queue.abandon_plan()

    def share(self, message: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Every rank's message."""
        together = self._members._allgather(np.frombuffer(message, np.uint8), lengths).tobytes()
        ends = np.cumsum(lengths)
        return [together[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def mismatch(self, request: Request, digests: Sequence[int]) -> MismatchError:
        """The error that compares the ranks' requests."""
        comparison = self.compare(request)
        if SHUTDOWN.digest in digests:
            # A rank has left: to wait for it again would take forever.
            self._over = comparison
        return MismatchError(comparison)

    def compare(self, request: Request) -> str:
        """Tells all members this request, and which others they have made; all call it."""
        location = caller() or ("" if request == SHUTDOWN else "unknown location")
        text = f"{request} at {location}" if location else str(request)
        mine = text.encode()
        lengths = self._members._exchange(np.array([len(mine), 0], np.int64))[:, 0].tolist()
        texts = [each.decode() for each in self.share(mine, lengths)]
        return mismatch_text(texts, self._members.ranks)
