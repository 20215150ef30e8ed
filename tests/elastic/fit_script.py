"""Trains a model whose weights count: row i of the data is trained on as often as weight i says.

Arguments: ``strategy`` or ``horovod``, the API; who is killed when, such as ``1@5,2@70``: rank 1 before its step 5 (see
``faults.py``); a directory for checkpoints, if they are wanted. FIT_DATA is the kind of data, with the seed of
``loader`` and ``permuted``; FIT_MICRO_BATCHES the number of micro-batches of an update, FIT_ROWS that of rows,
FIT_HELD_OUT that of rows for validation, FIT_STEPS that of steps of an epoch, of which three are one pass then,
FIT_VERBOSE what ``fit`` prints, FIT_SCALED whether the loss is scaled, FIT_MOMENTUM whether the momentum is 1, so that
the optimizer's state counts, FIT_CLOSED whether standard input and error are closed.
With CHOROS_OVERLAP=1 there are three layers of weights, and each is a bucket.
Prints a line of JSON on each rank. New ranks, and those that are started again, have no faults.
"""

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
from faults import Faults

import choros
import choros.distribute as dist
import choros.keras as hvd
from choros.comm import global_process_set
from choros.observe import events
from choros.parallel.reduce import plan
from choros.training.sliced_optimizer import whole_outlines, whole_values

ROWS, BATCH, EPOCHS = int(os.environ.get("FIT_ROWS", "203")), 16, 3
api = sys.argv[1]
directory = Path(sys.argv[3]) if len(sys.argv) > 3 else None
kind, _, seed = os.environ.get("FIT_DATA", "").partition(":")
passes = int(os.environ.get("FIT_MICRO_BATCHES", "1"))
held_out = int(os.environ.get("FIT_HELD_OUT", "30"))
steps = int(os.environ["FIT_STEPS"]) if "FIT_STEPS" in os.environ else None
started = os.getpid()


class Total(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred[:, 0]


class Rows(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones_like(y_true))


class Labels(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index):
        chosen = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[chosen], self.y[chosen]


def dataset(x, y):
    """A data set of the wanted kind, or a tuple of arrays."""
    if kind == "loader":
        import torch

        tensors = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        generator = torch.Generator().manual_seed(int(seed or 1))
        return torch.utils.data.DataLoader(tensors, batch_size=BATCH, shuffle=True, generator=generator)
    if kind == "tf":
        import tensorflow as tf

        tf.random.set_seed(1)
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=1).batch(BATCH)
    if kind == "grain":
        import grain

        source = grain.MapDataset.range(len(x)).shuffle(seed=1).map(lambda row: (x[row], y[row]))
        return source.to_iter_dataset().batch(BATCH)
    if kind == "permuted":
        order = np.random.default_rng(int(seed)).permutation(len(x))
        x, y = x[order], y[order]
    return Batches(x, y) if kind in ("py_dataset", "permuted") else (x, y)


for descriptor in (0, 2) if "FIT_CLOSED" in os.environ else ():
    os.close(descriptor)
hvd.init()
begun = []
events.listen(begun.append, [events.Kind.STEP_BEGUN])
communicator = global_process_set.communicator
number = communicator.rank
faults = Faults(sys.argv[2], communicator, directory)
has_momentum = "FIT_MOMENTUM" in os.environ
own_passes = {"gradient_accumulation_steps": passes} if passes > 1 and api == "strategy" else {}
weight = 2.0 if api == "strategy" and passes == 1 and not kind else 1.0  # of the only class
optimizer = keras.optimizers.SGD(1 / weight, momentum=float(has_momentum), **own_passes)
if "FIT_SCALED" in os.environ:
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
strategy = dist.MultiWorkerMirroredStrategy() if api == "strategy" else None
with strategy.scope() if strategy else contextlib.nullcontext():
    given, layers = keras.Input((ROWS,)), 1
    if os.environ.get("CHOROS_OVERLAP") == "1":
        layers, plan._BUCKET_BYTES = 3, 1
    dense = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(given) for _ in range(layers)]
    model = keras.Model(given, sum(dense[1:], dense[0]))
    model.compile(
        optimizer if strategy else hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes),
        Total(reduction="sum"),
        metrics=[Rows(name="rows"), Labels(name="labels")],
    )
rows, zeros = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
validation = dataset(rows[:held_out], np.arange(held_out, dtype="float32")[:, None])
data = {"x": dataset(rows, zeros)} if kind else {"x": rows, "y": zeros, "batch_size": BATCH}
if weight > 1:
    data["class_weight"] = {0: weight}
callbacks = [faults.callback()]
if api == "horovod":
    data = {"x": hvd.shard((rows, zeros), batch_size=BATCH, shuffle=True), "shuffle": False}
    validation = hvd.shard(validation, batch_size=None if kind else BATCH)
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    callbacks = [hvd.callbacks.ElasticCallback(data["x"], own), *own, *callbacks]
if directory is not None and (strategy or number == 0):  # a strategy's ranks write one file, Horovod's all write
    callbacks.append(keras.callbacks.ModelCheckpoint(directory / "checkpoint.weights.h5", save_weights_only=True))
if directory is not None and strategy:
    callbacks.append(keras.callbacks.CSVLogger(directory / "log.csv"))
    callbacks.append(keras.callbacks.BackupAndRestore(directory / "backup", delete_checkpoint=False))
verbose = int(os.environ.get("FIT_VERBOSE", "0"))
options = {"epochs": EPOCHS, "steps_per_epoch": steps, "verbose": verbose, "callbacks": callbacks}
history = model.fit(**data, **options, validation_data=validation)
counts = -np.concatenate(model.get_weights(), axis=1)
if passes > 1:  # of which the last update may lack some, whose gradients the optimizer has
    scale = passes if api == "strategy" else 1  # Horovod adds the gradients of micro-batches
    accumulated = next(
        value
        for value, (path, *_) in zip(whole_values(model.optimizer), whole_outlines(model.optimizer), strict=True)
        if "accumulator" in path
    )
    counts = counts * scale + accumulated * scale / passes
if has_momentum:  # the sum of all gradients
    state = list(whole_values(model.optimizer))
    counts = -np.concatenate([each for each in state if each.ndim == 2], axis=1)
times = 1 if steps else EPOCHS
report = {
    "rank": number,
    "job": os.environ["CHOROS_JOB"],
    "same_process": os.getpid() == started,
    "size": hvd.size(),
    "wrong": {str(row): counts[row].tolist() for row in np.flatnonzero((counts != times).any(axis=1))},
    "epochs": len(history.history["loss"]),
    "begun": len(begun),
    "weights": hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest(),
    "updates": int(model.optimizer.iterations),
    "rows": history.history["rows"],
    "val_loss": history.history["val_loss"],
    "val_rows": history.history["val_rows"],
    "val_labels": history.history["val_labels"],
    "noise": repr(choros.noise_scale()),
}
print(json.dumps(report), flush=True)
