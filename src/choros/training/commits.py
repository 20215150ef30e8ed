"""Commits of ``fit``: its state is written to the job's directory after each epoch, and when the job is asked to end.

::

    chorosrun --commit-dir runs/commits -np 4 --min-np 2 python train.py

    runs/commits/fit-1/commit-00000003.npz      the script's first call of fit, after its third epoch
    runs/commits/fit-2/…                        its second call

The same command, started again on any number of ranks, goes on in its call of ``fit``, in the middle of an epoch with
the next batch; calls that are complete return.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from choros.comm import global_process_set
from choros.elastic.commit_store import CommitStore
from choros.elastic.preemption import end_job
from choros.errors import ConfigError
from choros.parallel.objects import object_of_first
from choros.training.elastic_epochs import ElasticEpochs
from choros.training.keras_internals import set_initial_epoch, sync_jax_state
from choros.training.metrics import merged_metrics
from choros.training.run_state import RestoringCallback, RunState
from choros.training.trainer import steps_of

__all__ = ["CommitCallback"]

_log = logging.getLogger("choros")
_calls = itertools.count(1)


@final
class CommitCallback(RestoringCallback):
    """Restores the last commit when ``fit`` begins, and writes one after each epoch; the last callback of all ranks.

    In an elastic job it lets ``ElasticEpochs`` commit in the middle of an epoch. The metrics of the epoch so far, of
    all ranks, are then in the commit, and rank 0 goes on with them.

    Args:
        directory: the job's directory of commits.
        callbacks: the other callbacks of ``fit``, whose state commits contain.
    """

    def __init__(self, directory: str, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._store = CommitStore(Path(directory) / f"fit-{next(_calls)}")
        self._callbacks = callbacks
        self._epochs: ElasticEpochs | None = None
        self._restored: dict[str, Any] | None = None
        self._next: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Goes on from the last commit, which rank 0 reads, if there is one; a new rank knows the others'."""
        self._run = RunState(self.model, [*self._callbacks, self.model.history])
        self._epochs = steps_of(self.model).epochs
        if self._epochs is not None:
            self._epochs.commit = self._commit
        if global_process_set.communicator.is_new:
            return
        is_first = global_process_set.communicator.rank == 0
        self._restored = object_of_first(self._last_state)
        if self._restored is None:
            return
        self._restore(self._restored | {"metrics": None})
        epoch, position = self._restored["epoch"], self._restored["position"] or {}
        set_initial_epoch(self.model, epoch)
        if self._epochs is not None and position:
            self._epochs.resume(position)
        elif position.get("ledger"):
            raise ConfigError(
                f"the commit in {self._store.directory} is in the middle of an epoch, where only an elastic job can go "
                "on: start it by chorosrun with --min-np."
            )
        if not is_first:
            return
        where = self._store.directory
        if epoch >= self.params["epochs"]:
            _log.warning("all epochs of this fit are in the commit in %s: to train anew, choose another one.", where)
        else:
            after = f"in epoch {epoch + 1}" if position.get("ledger") else f"after epoch {epoch}"
            _log.warning("training goes on %s, from the commit in %s.", after, where)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Commits the epoch before: Keras' history, which comes after all other callbacks, has it now."""
        restored, self._restored = self._restored, None
        if restored is not None:  # that history has forgotten its epochs when training began, and metrics are reset
            batch = None
            if restored["metrics"] is not None and self._epochs is not None:
                batch = self._epochs.example_batch()
            if batch is None or global_process_set.communicator.rank != 0:
                restored |= {"metrics": None}
            self._restore(restored, batch)
            self._goes_on = restored if restored["in_epoch"] else None
        if self._next == epoch:
            self._write(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Marks that there is something to commit."""
        self._next = epoch + 1

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Commits that this call of ``fit`` is complete, also if it was stopped early."""
        if self._epochs is not None:
            self._epochs.ledger = None  # no epoch goes on
        if self._next is not None:
            self._write(self.params["epochs"])
        if self._epochs is not None and self._epochs.job_ends:
            end_job(lambda: self._write(self.params["epochs"]))

    def _last_state(self) -> dict[str, Any] | None:
        last = self._store.load_last()
        return None if last is None else last.state

    def _restore(self, state: dict[str, Any], batch: Any = None) -> None:
        if self._run is not None:
            self._run.restore(state, batch)

    def _commit(self) -> None:
        """Commits between two steps, or in a validation, whose metrics are not needed: it will be made again."""
        if self._epochs is None or self._epochs.ledger is None:
            return
        if steps_of(self.model).in_test:
            self._write(self._epochs.ledger.epoch, in_epoch=True)
        else:
            sync_jax_state(self.model)
            with merged_metrics(self.model.metrics):
                self._write(self._epochs.ledger.epoch, in_epoch=True, metrics=True)

    def _write(self, epoch: int, *, in_epoch: bool = False, metrics: bool = False) -> None:
        if self._run is not None and global_process_set.communicator.rank == 0:
            position = None if self._epochs is None else self._epochs.position
            state = self._run.capture(epoch=epoch, position=position, metrics=metrics)
            self._store.write(state | {"in_epoch": in_epoch})
