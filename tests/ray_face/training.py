"""What the ranks of these tests run."""

from __future__ import annotations

import os
import time
from pathlib import Path

ROWS, BATCH = 203, 16


def count_rows(epochs: int, folder: str = "", until: int = 0) -> dict[str, object]:
    """Trains a weight for each row, which is the number of times that the row was trained on. In step 8 of the first
    epoch rank 0 writes the file ``middle``. With ``until`` it trains until there are so many ranks again.
    """
    import keras
    import numpy as np

    import choros.distribute as dist
    import choros.keras as hvd

    hvd.init()
    started = hvd.size()

    class Total(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred[:, 0]

    class Watch(keras.callbacks.Callback):
        """Has a state, without which a new rank would stop later than the others."""

        def __init__(self):
            super().__init__()
            self.steps, self.fewest, self.most = 0, started, started

        def on_train_batch_begin(self, batch, logs=None):
            self.steps += 1
            self.fewest, self.most = min(self.fewest, hvd.size()), max(self.most, hvd.size())
            if folder:
                time.sleep(0.03)
                if self.steps == 8 and hvd.rank() == 0:
                    Path(folder, "middle").touch()

        def on_epoch_end(self, epoch, logs=None):
            if folder and hvd.rank() == 0:
                with Path(folder, "sizes").open("a") as file:
                    file.write(f"{hvd.size()}\n")
            is_whole = not until or (hvd.size() == until and (self.fewest, self.most) != (until, until))
            self.model.stop_training = epoch + 1 >= epochs and is_whole

    strategy = dist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((ROWS,)), dense])
        model.compile(keras.optimizers.SGD(1.0), Total(reduction="sum"))
    watch = Watch()
    rows, zeros = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
    history = model.fit(rows, zeros, batch_size=BATCH, epochs=500, verbose=0, callbacks=[watch])
    counts = -np.asarray(model.get_weights()[0])[:, 0]
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "epochs": len(history.history["loss"]),
        "counts": sorted(set(counts.tolist())),
        "fewest": watch.fewest,
        "backend": keras.backend.backend(),
        "pid": os.getpid(),
    }
