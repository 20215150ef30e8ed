"""Commits of ``fit``: after each epoch its state is written to the job's directory; the next start goes on from there.

::

    chorosrun --commit-dir runs/commits -np 4 --min-np 2 python train.py

    runs/commits/fit-1/commit-00000003.npz      the script's first call of fit, after its third epoch
    runs/commits/fit-2/…                        its second call

The same command, started again on any number of ranks, goes on in its call of ``fit``; calls that are complete return.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import keras

from choros.comm import global_process_set
from choros.elastic.commit_store import CommitStore
from choros.parallel.objects import broadcast_object
from choros.training.keras_internals import set_initial_epoch
from choros.training.run_state import RunState

__all__ = ["CommitCallback"]

_log = logging.getLogger("choros")
_calls = itertools.count(1)


@final
class CommitCallback(keras.callbacks.Callback):
    """Restores the last commit when ``fit`` begins, and writes one after each epoch; the last callback of all ranks.

    Args:
        directory: the job's directory of commits.
        callbacks: the other callbacks of ``fit``, whose state commits contain.
    """

    def __init__(self, directory: str, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._store = CommitStore(Path(directory) / f"fit-{next(_calls)}")
        self._callbacks = callbacks
        self._run: RunState | None = None
        self._restored: dict[str, Any] | None = None
        self._next: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Goes on from the last commit, which rank 0 reads, if there is one."""
        self._run = RunState(self.model, [*self._callbacks, self.model.history])
        is_first = global_process_set.rank() == 0
        last = self._store.load_last() if is_first else None
        self._restored = broadcast_object(None if last is None else last.state)
        self._restore()
        if self._restored is not None:
            set_initial_epoch(self.model, self._restored["epoch"])
            if is_first:
                after, where = self._restored["epoch"], self._store.directory
                _log.warning("training goes on after epoch %d, from the commit in %s.", after, where)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Commits the epoch before: Keras' history, which comes after all other callbacks, has it now."""
        self._restore()  # that history has forgotten its epochs when training began
        self._restored = None
        if self._next == epoch:
            self._write(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Marks that there is something to commit."""
        self._next = epoch + 1

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002  (Keras')
        """Commits that this call of ``fit`` is complete, also if it was stopped early."""
        if self._next is not None:
            self._write(self.params["epochs"])

    def _restore(self) -> None:
        if self._run is not None and self._restored is not None:
            self._run.restore(self._restored)

    def _write(self, epoch: int) -> None:
        if self._run is not None and global_process_set.rank() == 0:
            self._store.write(self._run.capture(epoch=epoch, metrics=False))
