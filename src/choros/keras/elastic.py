"""Horovod's elastic API for Keras.

::

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
        ]
        state.model.fit(hvd.shard((x, y), batch_size=128), epochs=epochs - state.epoch, callbacks=callbacks)

    train(state)
"""

from choros.elastic.retry import run
from choros.elastic.state import ObjectState, State
from choros.errors import HostsUpdatedInterrupt
from choros.parallel.horovod import HorovodInternalError
from choros.training.elastic_state import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
