"""Evaluation in a job that ranks leave and join: the metrics are those of each row once, whichever ranks are lost.

::

    rank 0            rank 1            rank 2
    shard 0 of 3      shard 1 of 3      shard 2 of 3           the ranks that there are when it begins
    batches           batches           batches
    meets ◄────────── killed ─────────► meets                  about once a second, and when no rank has batches left
    shard 0 of 2                        shard 1 of 2           again, with fresh metrics
    batches                             batches
    meets ◄───────────────────────────► meets
    merges metrics ◄──────────────────► merges metrics         if a rank is lost meanwhile: again
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from choros.comm import Request, global_process_set
from choros.parallel.data import EpochData
from choros.parallel.data.shard_batches import OPEN, ShardBatches
from choros.parallel.reduce.joining import Participation
from choros.training.keras_internals import build_metrics, epochs_of_any_length, has_metrics, sync_jax_state

__all__ = ["ElasticEvaluation", "RanksHaveChanged", "participation", "repeated"]

T = TypeVar("T")

_MEETING = Request("meeting between batches of an evaluation")
_SECOND = 1000


class RanksHaveChanged(Exception):
    """Ends an evaluation, or a prediction, of parts that belong to ranks of which some were lost."""


def repeated(function: Callable[[], T]) -> T:
    """Returns ``function()``, which is called again whenever it raises ``RanksHaveChanged``."""
    while True:
        try:
            return function()
        except RanksHaveChanged:
            pass


def next_interval(interval: int, milliseconds: int) -> int:
    """Returns after how many batches ranks meet again: about a second later, but at most twice as many as before.

    Args:
        interval: after how many they have met now.
        milliseconds: what these have taken the slowest rank.

    Example:
        >>> next_interval(1, 3), next_interval(256, 800), next_interval(256, 5000), next_interval(1, 9000)
        (2, 320, 51, 1)
    """
    return max(1, min(2 * interval, interval * _SECOND // max(1, milliseconds)))


def participation() -> Participation:
    """How a rank without batches meets the others."""
    return {_MEETING: lambda _: None}


@final
class ElasticEvaluation:
    """The evaluations of one model.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        #: The ranks over which the data were sharded, as they were launched; ``None`` if they were not.
        self._ranks: tuple[int, ...] | None = None
        self._batches = self._interval = self._next = 1
        self._since = 0.0

    def run(self, evaluate: Callable[[], T], data: EpochData | None, epoch: int) -> T:
        """Returns ``evaluate()``, which is called again if a rank that has a shard of the data is lost meanwhile.

        Args:
            evaluate: evaluates this rank's part.
            data: the data, which are sharded before each call; ``None`` if nothing can.
            epoch: the epoch of training, which determines the order of the data.
        """

        def attempt() -> T:
            communicator = global_process_set.communicator
            self._ranks = None if data is None else communicator.launched
            if data is not None:
                if not has_metrics(self._model):  # and this rank may have no rows, from which Keras would create them
                    build_metrics(self._model, next(data.batches([ShardBatches(0, 1, range(1))], epoch)))
                data.begin_epoch(epoch, [ShardBatches(communicator.rank, communicator.size, range(OPEN))])
            try:
                return evaluate()
            finally:
                sync_jax_state(self._model)

        outer = self._ranks
        try:
            with epochs_of_any_length():
                return repeated(attempt)
        finally:
            self._ranks = outer

    def begin(self) -> None:
        """Begins the batches."""
        self.check()
        self._batches, self._interval, self._next = 0, 1, 1
        self._since = time.monotonic()

    def begin_batch(self) -> bool:
        """Counts a batch, before it is evaluated; returns whether the ranks meet now, all before the same batch."""
        self._batches += 1
        return self._batches > self._next

    def meet(self) -> None:
        """Meets the other ranks."""
        communicator = global_process_set.communicator
        own = round(_SECOND * (time.monotonic() - self._since))
        slowest = max(communicator.atomic(lambda: communicator.agree(_MEETING, value=own)))
        self._interval = next_interval(self._interval, slowest)
        self._next += self._interval
        self._since = time.monotonic()

    @property
    def has_changed(self) -> bool:
        """Whether some of the ranks over which the data were sharded were lost."""
        return self._ranks not in (None, global_process_set.communicator.launched)

    def check(self) -> None:
        """Raises ``RanksHaveChanged`` if they were."""
        if self.has_changed:
            raise RanksHaveChanged
