"""Evaluation by all ranks. In a job that ranks leave and join, metrics are those of each row once, whoever is lost.

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

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from choros.comm import Request, global_process_set, has_others, joining
from choros.comm.request import CollectiveSpec
from choros.data.epochs import EpochData
from choros.data.kinds import epochs_behind, share_orders
from choros.data.plan import OPEN, ShardBatches
from choros.elastic.preemption import leave_if_asked
from choros.training.keras_internals.fit import abandon_test, epochs_of_any_length, finish_step, sync_jax_state
from choros.training.keras_internals.models import build_metrics
from choros.training.metrics import global_metrics
from choros.training.weighting import current_step

T = TypeVar("T")

_MEETING = Request("meeting between batches of an evaluation", spec=CollectiveSpec("agreement"))
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
    """After how many batches ranks meet again: about a second of the slowest, but at most twice as many as before.

    >>> next_interval(1, 3), next_interval(256, 800), next_interval(256, 5000), next_interval(1, 9000)
    (2, 320, 51, 1)
    """
    return max(1, min(2 * interval, interval * _SECOND // max(1, milliseconds)))


@final
class Evaluation:
    """The evaluations of one model by all ranks: ``results`` are the metrics of all rows, once one has ended."""

    def __init__(self, model: Any, steps: Any) -> None:
        """``steps``: the model's ``trainer.Steps``."""
        self.is_running = False
        self.results: dict[str, Any] | None = None
        self._model = model
        self._steps = steps
        self._evaluate: Any = None
        #: The ranks over which the data were sharded, as they were launched; ``None`` if they were not.
        self._ranks: tuple[int, ...] | None = None
        self._data: EpochData | None = None
        self._batches = self._interval = self._next = 1
        self._since = 0.0

    def wrap(self) -> None:
        """Wraps ``evaluate``, which ``fit`` calls, too, for data that each evaluation can shard anew."""
        model, own = self._model, self._model.evaluate
        if own is self._evaluate:
            return

        @functools.wraps(own)
        def evaluate(x: Any = None, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                try:
                    return own(x, *args, **kwargs)
                except RanksHaveChanged:
                    abandon_test(kwargs.get("callbacks"))
                    raise

            return self.run(run, epochs_behind(x))

        self._evaluate = evaluate
        # Bypasses Keras' attribute tracking: the function is not part of the model.
        object.__setattr__(model, "evaluate", evaluate)

    def run(self, evaluate: Callable[[], T], data: EpochData | None) -> T:
        """``evaluate()``; in an elastic job again if a rank that has a shard is lost: ``data`` are sharded before."""
        if not global_process_set.communicator.elastic:
            return evaluate()
        epochs = self._steps.epochs
        epoch = 0 if epochs is None else epochs.data.epoch

        def attempt() -> T:
            communicator = global_process_set.communicator
            if self._has_changed and epochs is not None and not self._steps.accumulated:
                self._steps.cut_anew(have_met=True)  # replaces the copies of slices that were lost, before more are
            self._ranks = None if data is None else communicator.launched
            if data is not None:
                # This rank may have no rows, from which Keras would create them.
                build_metrics(self._model, lambda: next(data.batches([ShardBatches(0, 1, range(1))], epoch)))
                data.begin_epoch(epoch, [ShardBatches(communicator.rank, communicator.size, range(OPEN))])
            try:
                return evaluate()
            finally:
                sync_jax_state(self._model)

        outer = self._ranks, self._data
        self._data = data
        try:
            with epochs_of_any_length():
                return repeated(attempt)
        finally:
            self._ranks, self._data = outer

    def forget(self) -> None:
        """Forgets an evaluation that an exception has ended."""
        self.is_running = False
        self._model.__dict__.pop("get_metrics_result", None)

    def begin(self) -> None:
        """Begins the batches: ``evaluate`` then returns, and callbacks get, the metrics of all examples."""
        self._check()
        is_shared = has_others(global_process_set)
        if self._data is not None:  # in an elastic job
            self._data.agree()
        elif is_shared and not global_process_set.communicator.elastic:
            share_orders(global_process_set)
        self._batches, self._interval, self._next = 0, 1, 1
        self._since = time.monotonic()
        self.is_running, self.results = is_shared, None
        if self.is_running:

            def metrics_result() -> Any:
                return self.end() if current_step() is None else type(self._model).get_metrics_result(self._model)

            # Bypasses Keras' attribute tracking; Keras' method is called in each step, and once at the end.
            object.__setattr__(self._model, "get_metrics_result", metrics_result)

    def begin_batch(self) -> None:
        """In an elastic job, meets the others before some of the batches: all before the same one. Raises
        ``RanksHaveChanged`` to begin again, ``SystemExit`` if the rank or job ends.
        """
        communicator = global_process_set.communicator
        if not (self.is_running and communicator.elastic):
            return
        self._batches += 1
        if self._batches <= self._next:
            return
        finish_step()
        own = round(_SECOND * (time.monotonic() - self._since))
        slowest = max(communicator.agree(_MEETING, value=own))
        self._interval = next_interval(self._interval, slowest)
        self._next += self._interval
        self._since = time.monotonic()
        epochs = self._steps.epochs
        if self._has_changed or (epochs is not None and epochs.job_ends):
            self._join()  # ranks without batches come back, too
            raise RanksHaveChanged
        leave_if_asked()

    def end(self) -> dict[str, Any]:
        """Ends it when no rank has batches left, with all metrics; on ``RanksHaveChanged`` it begins again."""
        self._model.__dict__.pop("get_metrics_result", None)
        if self.is_running:
            self._join()
            self.is_running = False
        if self.results is None:
            results = global_metrics(self._model)
            self._check()
            self.results = results
        return self.results

    def _join(self) -> None:
        """Participates in the others' test steps until no rank goes on with this evaluation."""
        joining.join(global_process_set.communicator, {})
        if self._steps.epochs is not None:
            self._steps.epochs.end_if_job_ends()
        self._check()

    @property
    def _has_changed(self) -> bool:
        """Whether some of the ranks over which the data were sharded were lost."""
        return self._ranks not in (None, global_process_set.communicator.launched)

    def _check(self) -> None:
        if self._has_changed:
            raise RanksHaveChanged
