"""New ranks in ``fit``: they take the places of lost ones between two steps, with the state of those that have stayed.

::

    rank 0, 2                                           the new process, at first as if it were rank 1 (newcomer.py)
    step 17, without rank 1                             fit: on_train_begin
    step 18                                               waits
    admit() ◄─────────────────────────────────────────► admit()                  ranks 0, 1, and it is rank 2
    position, state of fit ───────────────────────────► begins fit in that epoch
    step 19 ◄─────────────────────────────────────────► step 19                  with the batches that rank 1 has left

At the beginning of an epoch it gets a shard of its own. In the middle of one, it takes over what a lost rank has left,
if Keras can begin data of this kind there; else it waits for the next epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from choros.comm import admit, global_process_set
from choros.parallel.objects import broadcast_object
from choros.training.elastic_epochs import ElasticEpochs
from choros.training.keras_internals import build_from_batch, is_built, set_initial_epoch
from choros.training.run_state import RestoringCallback, RunState
from choros.training.trainer import steps_of

__all__ = ["AdmissionCallback"]


@final
class AdmissionCallback(RestoringCallback):
    """Takes new ranks in during ``fit``; the last callback of all ranks, in an elastic job.

    Args:
        callbacks: the other callbacks of ``fit``, whose state new ranks receive.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._received: dict[str, Any] | None = None

    @property
    def _epochs(self) -> ElasticEpochs:
        epochs = steps_of(self.model).epochs
        assert epochs is not None  # noqa: S101  (the job is elastic)
        return epochs

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Waits, in a new rank, until the others take it in, and goes on where they are.

        If the others are in a later call of ``fit``, this one ends at once.
        """
        self._run = RunState(self.model, [*self._callbacks, self.model.history])
        self._epochs.admit = self._admit
        if not global_process_set.communicator.is_new:
            return
        if not admit():
            set_initial_epoch(self.model, self.params["epochs"])
            return
        received = self._received = broadcast_object(None)
        self._epochs.take_over(received["position"])
        set_initial_epoch(self.model, received["run"]["epoch"])
        if not is_built(self.model):
            build_from_batch(self.model, self._epochs.example_batch())
        self._run.restore(received["run"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Restores, in a new rank, what other callbacks have set at the beginning of an epoch that is under way."""
        received, self._received = self._received, None
        if received is not None and received["position"]["ledger"] is not None and self._run is not None:
            self._run.restore(received["run"])
            self._goes_on = received["run"]

    def _admit(self, epoch: int) -> bool:
        """Takes in a new rank, between two steps, if one waits; sends it the state of rank 0, which is an older one."""
        if self._received is not None and self._run is not None:
            self._run.restore(self._received["run"])  # callbacks have set it back when training began
            if self._received["position"]["ledger"] is not None:  # the others are in the middle of the epoch
                return False
        if not admit():
            return False
        state = None
        if global_process_set.rank() == 0 and self._run is not None:
            state = {"position": self._epochs.position, "run": self._run.capture(epoch=epoch, metrics=False)}
        broadcast_object(state)
        return True
