"""A run of ``fit`` with which others go on: its state is written to the job's directory after each epoch, and when the
job is asked to end; new ranks receive it, and take the places of lost ones between two steps.

::

    chorosrun --commit-dir runs/commits -np 4 --min-np 2 python train.py

    runs/commits/fit-1/commit-00000003.npz      the script's first call of fit, after its third epoch
    runs/commits/fit-2/…                        its second call

The same command, started again on any number of ranks, goes on in its call of ``fit``, in the middle of an epoch with
the next batch; calls that are complete return. In a job under way::

    rank 0, 2                                           the new process, at first as if it were rank 1 (local.py)
    step 17, without rank 1                             fit: on_train_begin
    step 18                                               waits
    admit() ◄─────────────────────────────────────────► admit()                  ranks 0, 1, and it is rank 2
    position, state of fit ───────────────────────────► begins fit in that epoch
    step 19 ◄─────────────────────────────────────────► step 19                  with the batches that rank 1 has left

At the beginning of an epoch it gets a shard of its own. In the middle of one, it takes over what a lost rank has left,
if Keras can begin data of this kind there; else it waits for the next epoch.
"""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import keras

from choros.comm import admit, global_process_set, is_nested
from choros.elastic.commit_store import CommitStore
from choros.elastic.preemption import end_job
from choros.errors import ConfigError
from choros.observe.progress import page
from choros.parallel.objects import broadcast_object, object_of_first, shared_result
from choros.training.elastic_epochs import ElasticEpochs
from choros.training.keras_internals.fit import set_initial_epoch, sync_jax_state
from choros.training.keras_internals.models import build_from_batch, built_optimizers, is_built
from choros.training.metrics import merged_metrics
from choros.training.run_state import RunState
from choros.training.trainer import steps_of

_log = logging.getLogger("choros")
_calls = itertools.count(1)


@final
class RunCallback(keras.callbacks.Callback):
    """Restores the last commit in ``directory``, if one is given, when ``fit`` begins, and writes one after each epoch;
    takes new ranks in if it ``admits``. The last callback of all ranks, with the other ``callbacks``' state. A commit
    in the middle of an epoch (``ElasticEpochs``) has all ranks' metrics so far; rank 0 goes on with them.
    """

    _epochs: ElasticEpochs | None
    _run: RunState

    def __init__(self, callbacks: Sequence[Any], directory: str = "", *, admits: bool = False) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._store = CommitStore(Path(directory) / f"fit-{next(_calls)}") if directory else None
        self._admits = admits
        self._restored: dict[str, Any] | None = None
        self._received: dict[str, Any] | None = None
        #: The state from which an epoch goes on in its middle, until all callbacks have begun it.
        self._goes_on: dict[str, Any] | None = None
        #: The epoch at whose beginning there is something to commit.
        self._next: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Goes on from the last commit, which rank 0 reads, if there is one; a new rank waits until it is taken in."""
        if self._store is None and not self._admits:
            return
        self._run = RunState(self.model, [*self._callbacks, self.model.history])
        self._epochs = epochs = steps_of(self.model).epochs
        if epochs is not None:
            epochs.commit = None if self._store is None else self._commit
            epochs.admit = self._admit if self._admits and not is_nested() else None
        if self._admits and epochs is not None and not is_built(self.model):
            batch = epochs.example_batch()
            if batch is not None:
                build_from_batch(self.model, batch)
        if self._admits and is_built(self.model):
            # On all ranks: TensorFlow builds them in the first step, before which one may join.
            built_optimizers(self.model)
        if not global_process_set.communicator.is_new:
            self._restore_last()
        elif self._admits and epochs is not None:
            self._begin_late(epochs)

    def _restore_last(self) -> None:
        last = None if self._store is None else object_of_first(self._store.load_last)
        if self._store is None or last is None:
            return
        self._restored = last
        self._run.restore(last | {"metrics": None})
        epoch, position, where = last["epoch"], last["position"] or {}, self._store.directory
        set_initial_epoch(self.model, epoch)
        if self._epochs is not None and position:
            self._epochs.resume(position)
        elif position.get("ledger"):
            raise ConfigError(
                f"the commit in {where} is in the middle of an epoch, where only an elastic job can go on: start it by "
                "chorosrun with --min-np."
            )
        if global_process_set.communicator.rank != 0:
            return
        if epoch >= self.params["epochs"]:
            _log.warning("all epochs of this fit are in the commit in %s: to train anew, choose another one.", where)
        else:
            after = f"in epoch {epoch + 1}" if position.get("ledger") else f"after epoch {epoch}"
            _log.warning("training goes on %s, from the commit in %s.", after, where)

    def _begin_late(self, epochs: ElasticEpochs) -> None:
        """Waits until this rank is taken in; if the others are in a later call of ``fit``, this one ends."""
        if not admit():
            set_initial_epoch(self.model, self.params["epochs"])
            return
        received = self._received = broadcast_object(None)
        epochs.take_over(received["position"])
        set_initial_epoch(self.model, received["epoch"])
        if not is_built(self.model):
            build_from_batch(self.model, epochs.example_batch())
        self._run.restore(received)
        steps_of(self.model).cut_anew(joins=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Commits the epoch before: Keras' history, which comes after all other callbacks, has it now. Restores what
        callbacks, and history, have forgotten when training, or an epoch that is under way, began.
        """
        restored, self._restored = self._restored, None
        if restored is not None:
            batch = None
            if restored["metrics"] is not None and self._epochs is not None:
                batch = self._epochs.example_batch()
            if batch is None or global_process_set.communicator.rank != 0:
                restored |= {"metrics": None}
            self._run.restore(restored, batch)
            self._goes_on = restored if restored["in_epoch"] else None
        if self._next == epoch:
            with page.counted_as("committed"):
                self._write(epoch)
        received, self._received = self._received, None
        if received is not None and received["position"]["ledger"] is not None:
            self._run.restore(received)
            self._goes_on = received

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Marks that there is something to commit."""
        self._next = epoch + 1

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Commits that this call of ``fit`` is complete, also if it was stopped early."""
        if self._store is None:
            return
        if self._epochs is not None:
            self._epochs.ledger = None  # no epoch goes on
        if self._next is not None:
            self._write(self.params["epochs"])
        if self._epochs is not None and self._epochs.job_ends:
            end_job(lambda: self._write(self.params["epochs"]))

    def share_history(self) -> None:
        """Gives a new rank that has passed this call of ``fit`` by the others' history; after the opening."""
        history = self.model.history
        history.epoch, history.history = shared_result((history.epoch, history.history))

    def restore_callbacks(self) -> None:
        """Restores the callbacks once more after the beginning of an epoch that goes on in its middle, where they zero
        their counts; call it before anything else happens in it.
        """
        state, self._goes_on = self._goes_on, None
        if state is not None:
            self._run.restore_callbacks(state)

    def _admit(self, epoch: int) -> bool:
        """Takes in a new rank, between two steps, if one waits; sends it the state of rank 0, which is an older one."""
        if self._received is not None:
            self._run.restore(self._received)  # callbacks have set it back when training began
            if self._received["position"]["ledger"] is not None:  # the others are in the middle of the epoch
                return False
        if not admit():
            return False
        state = None
        if global_process_set.rank() == 0 and self._epochs is not None:
            state = self._run.capture(epoch=epoch, position=self._epochs.position, joins=True)
        broadcast_object(state)
        steps_of(self.model).cut_anew(joins=True)
        return True

    def _commit(self) -> None:
        """Commits between two steps, or in a validation, whose metrics are not needed: it will be made again."""
        if self._epochs is None or self._epochs.ledger is None:
            return
        with page.counted_as("committed"):
            if steps_of(self.model).evaluation.is_running:
                self._write(self._epochs.ledger.epoch, in_epoch=True)
            else:
                sync_jax_state(self.model)
                with merged_metrics(self.model.metrics):
                    self._write(self._epochs.ledger.epoch, in_epoch=True, metrics=True)

    def _write(self, epoch: int, *, in_epoch: bool = False, metrics: bool = False) -> None:
        if self._store is not None and global_process_set.communicator.rank == 0:
            position = None if self._epochs is None else self._epochs.position
            state = self._run.capture(epoch=epoch, position=position, metrics=metrics)
            self._store.write(state | {"in_epoch": in_epoch})
