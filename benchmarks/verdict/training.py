"""Trains for 15 s on data made here; the first argument names a bottleneck, ``removed`` after it leaves it out."""

from __future__ import annotations

import sys
import time

import keras
import numpy as np

import choros.keras as hvd

SECONDS = 20.0

hvd.init()
kind, removed = sys.argv[1], len(sys.argv) > 2
rank = hvd.rank()
made = "" if removed else kind
rows = 4 if kind == "small batches" else 2048
if kind == "small batches" and removed:
    rows *= 4
width = 16 if kind == "small batches" else 256
drawn = np.random.default_rng(0).normal(size=(rows, 33)).astype("float32")


class Batches(keras.utils.PyDataset):
    """Batches, of which the last one has fewer rows."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if made == "input of all" or (made == "input of rank 1" and rank == 1):
            time.sleep(0.05)
        number = rows if index < len(self) - 1 else max(1, rows // 3)
        return drawn[:number, 1:], drawn[:number, :1]


class Bounded(keras.callbacks.Callback):
    """Ends training after a time that all ranks measure together; makes a rank slow."""

    def on_train_begin(self, logs: object = None) -> None:
        del logs
        self.begin = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        del batch, logs
        if made == "rank 1 computes slowly" and rank == 1:
            time.sleep(0.05)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        del epoch, logs
        if float(hvd.allreduce(time.monotonic() - self.begin)) > SECONDS:
            self.model.stop_training = True


layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
model = keras.Sequential([keras.layers.Input((32,)), *layers, keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4)), "mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Bounded()]
data = Batches()
if kind == "a commit on each step":
    data = hvd.shard(data)
    callbacks.insert(0, hvd.callbacks.ElasticCallback(data))
model.fit(data, epochs=10_000, verbose=0, callbacks=callbacks)
