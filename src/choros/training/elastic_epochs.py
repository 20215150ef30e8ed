"""The epochs of ``fit`` in a job that ranks leave and join: each example of an epoch is trained on exactly once.

::

    on_epoch_begin    the ledger gives each rank a shard           rank 0: shard 0    rank 1: shard 1    rank 2: shard 2
    steps             all ranks make each together                 0 1 2 3 4 5        0 1 2 ✗            0 1 2 3 4 5
    end of batches    ranks without batches join the others
    what is left      sharded over the ranks that are left         shard 1: 3, 5                         shard 1: 4
    validation, on_epoch_end, callbacks
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

import keras

from choros.comm import global_process_set, on_change
from choros.comm.membership import Change
from choros.elastic.ledger import Ledger
from choros.parallel.data.epochs import EpochData

__all__ = ["ElasticEpochs"]

_log = logging.getLogger("choros")


@final
class ElasticEpochs:
    """What this rank trains on in each epoch; the ledger behind it is the same on all ranks.

    Args:
        data: the data set of ``fit``.
        batches: returns the number of batches on which all ranks have trained together so far.
        join: takes part in the others' steps until no rank has batches left.

    Attributes:
        ledger: that of the current epoch; ``None`` outside of epochs.
    """

    def __init__(self, data: EpochData, batches: Callable[[], int], join: Callable[[], None]) -> None:
        self.ledger: Ledger | None = None
        self._data = data
        self._batches = batches
        self._join = join
        self._counted = 0
        self._stop_listening: Callable[[], None] | None = None

    def start(self) -> None:
        """Follows what happens to the ranks, until ``stop``."""
        if self._data.doubt is not None and global_process_set.rank() == 0:
            _log.warning("if a rank is lost, not every example of the epoch is used exactly once: %s", self._data.doubt)
        self._stop_listening = on_change(self._on_change)

    def stop(self) -> None:
        """Ends with ``fit``."""
        if self._stop_listening is not None:
            self._stop_listening()
        self._stop_listening = self.ledger = None

    def begin(self, epoch: int) -> None:
        """Shards an epoch over the ranks, before Keras reads it."""
        communicator = global_process_set.communicator
        self.ledger = Ledger.of_epoch(epoch, communicator.size)
        self._counted = self._batches()
        self._data.begin_epoch(epoch, self.ledger.of_rank(communicator.rank))

    def finish(self, model: Any) -> None:
        """Trains on what lost ranks have left over; all ranks call it when none has batches left."""
        communicator = global_process_set.communicator
        self._count()
        while self.ledger is not None and self.ledger.lacks_owners:
            length = self._data.length(self.ledger.epoch)
            if self.ledger.is_done(length):
                return
            self.ledger = self.ledger.resharded(communicator.size, length)
            for batch in self._data.batches(self.ledger.of_rank(communicator.rank), self.ledger.epoch):
                x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
                model.train_on_batch(x, y, weights)
            self._join()
            self._count()

    def _count(self) -> None:
        """Counts the steps that have ended since the last time."""
        batches = self._batches()
        if self.ledger is not None:
            self.ledger = self.ledger.stepped(batches - self._counted)
        self._counted = batches

    def _on_change(self, change: Change) -> None:
        self._count()
        if self.ledger is not None:
            self.ledger = self.ledger.lost(change.new_ranks)
            for rank in change.joined:
                self.ledger = self.ledger.joined(rank)
