"""The ranks that are lost, as all others hear of it from rank 0, with whose process each rank keeps a connection. A
rank that leaves in order says so, and is not lost::

    rank 1          rank 0 (its store)              rank 2
      ✗ ends ──────► the connection ends ──Loss──►  check(): PeerLostError: rank 1 …
      raises ─"leaves because of …"─► the same      before its process has ended, which may take seconds
      is cut off ──► silence.py ends it ──Loss──►   the same; rank 1 itself loses rank 0
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from choros import durations
from choros.errors import EngineError, PeerLostError


@dataclass(frozen=True)
class Loss:
    """A rank that is lost, and its host; ``how`` is the end of a sentence that begins with the rank."""

    rank: int
    host: str
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.how}"


@final
class PeerWatch:
    """The ranks of this process's job, numbered as its launcher does, and which of them are lost.

    >>> peers = PeerWatch()
    >>> peers.note(Loss(1, "b", "has ended"))
    >>> peers.check([0, 2], lambda: "allreduce")
    >>> try:
    ...     peers.check([0, 1], lambda: "allreduce", grace=0)
    ... except PeerLostError as error:
    ...     print(error.ranks, str(error)[:53])
    (1,) allreduce cannot be completed: rank 1 on b has ended.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[Loss, float]] = {}
        self._changed = threading.Condition()

    def note(self, loss: Loss) -> None:
        """Records a loss, unless that rank is lost already."""
        with self._changed:
            self._losses.setdefault(loss.rank, (loss, time.monotonic()))
            self._changed.notify_all()

    def check(self, ranks: Sequence[int], waits_in: Callable[[], str], *, grace: float = durations.LOSS_GRACE) -> None:
        """Raises a ``PeerLostError`` if one of ``ranks``, for which this waits, was lost ``grace`` seconds ago."""
        if not self._losses:
            return
        with self._changed:
            losses = sorted((when, rank) for rank, (_, when) in self._losses.items() if rank in ranks)
            # What happens later may be its consequence.
            lost = [self._losses[rank][0] for when, rank in losses if when <= losses[0][0] + durations.LOSS_GRACE]
        if lost and losses[0][0] <= time.monotonic() - grace:
            others = "Its" if len(lost) == 1 else "Their"
            raise PeerLostError(
                f"{waits_in()} cannot be completed: {' and '.join(map(str, lost))}. {others} own output says why, if "
                "anything does. The job cannot go on without: start it again, from its last checkpoint.",
                ranks=[loss.rank for loss in lost],
            )

    @contextmanager
    def explaining(self, ranks: Sequence[int], waits_in: Callable[[], str]) -> Iterator[None]:
        """Turns an engine's error into a ``PeerLostError`` if one of ``ranks`` is lost; waits a moment for the news."""
        try:
            yield
        except PeerLostError:
            raise
        except EngineError:
            with self._changed:
                self._changed.wait_for(lambda: any(rank in self._losses for rank in ranks), durations.LOSS_REASON)
            self.check(ranks, waits_in, grace=0)
            raise
