"""Trains, as ``fit_script.py``, until all ranks that were killed have been replaced, and the job has as many as it may
have, three epochs at least.

Arguments: ``strategy`` or ``horovod``; where ranks are killed, such as ``1@5,2@70``; ``twice``: in a ``fit`` before it;
``waits``: the others wait in the middle of the epoch for a new rank; ``validates``: ranks are killed at the end of the
first validation, before the others wait for new ones; ``begins``: likewise when training begins, and weights are not
broadcast; ``joined``: rank 0 is killed while it takes a new rank in, and the loss has a second part, a mean;
``sends``: it is killed as it would send its state to a new rank, or chorosrun gets SIGTERM then (``ends``); ``cuts``:
it is killed after that, as it would cut slices anew;
``joins:FILE``: the first new rank is killed while it joins, and creates this file; ``built``: the optimizer is built
before ranks have slices of it. FIT_MOMENTUM as in ``fit_script.py``. A job that is started again has no faults.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
from faults import process_above

import choros
import choros.distribute as dist
import choros.keras as hvd
from choros.comm import NEWCOMER, global_process_set
from choros.comm.engines import mpi
from choros.training import distributed_optimizer, run_state
from choros.training.sliced_optimizer import state_of, whole_values

ROWS, BATCH = 203, 16
api, kills = sys.argv[1], dict(tuple(map(int, each.split("@"))) for each in sys.argv[2].split(",") if each)
started = os.getpid()
is_restarted = "CHOROS_RESTARTS" in os.environ
if is_restarted:  # without faults
    kills, sys.argv[3:] = {}, []


class Total(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred[:, 0]


class Rows(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones_like(y_true))


class Kill(keras.callbacks.Callback):
    steps = 0
    waits = "validates" in sys.argv

    def on_train_begin(self, logs=None):
        if "begins" in sys.argv and not is_new:
            if number in kills:
                os.kill(os.getpid(), signal.SIGKILL)
            while not communicator.noticed & NEWCOMER:
                communicator.barrier()
                time.sleep(0.01)

    def on_train_batch_begin(self, batch, logs=None):
        while "waits" in sys.argv and self.steps == 6 and not is_new and not communicator.noticed & NEWCOMER:
            communicator.barrier()
            time.sleep(0.01)
        if kills.get(number) == self.steps and not is_new and "validates" not in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        time.sleep(0.01)

    def on_test_end(self, logs=None):
        waits, self.waits = self.waits and not is_new, False
        if waits and number in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        while waits and not communicator.noticed & NEWCOMER:
            communicator.barrier()
            time.sleep(0.01)


class StopWhenReplaced(keras.callbacks.Callback):
    """Has a state, without which a new rank would stop later than the others."""

    def __init__(self):
        super().__init__()
        self.epochs, self.fewest = 0, size

    def on_train_begin(self, logs=None):
        self.fewest = min(self.fewest, hvd.size())

    def on_train_batch_end(self, batch, logs=None):
        self.fewest = min(self.fewest, hvd.size())

    def on_test_end(self, logs=None):
        self.fewest = min(self.fewest, hvd.size())

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        self.model.stop_training = self.epochs >= 3 and hvd.size() == most and (most > self.fewest or is_restarted)


hvd.init()
communicator = global_process_set.communicator
number, size, is_new = hvd.rank(), hvd.size(), communicator.is_new
if "joined" in sys.argv and number == 0 and not is_new:
    mpi.joined = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if "sends" in sys.argv and number == 0 and not is_new:
    run_state.RunState.capture = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
capture = run_state.RunState.capture


def captured(self, **given):
    if given.get("joins"):
        distributed_optimizer.cut_anew = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return capture(self, **given)


def captured_at_the_end(self, **given):
    if given.get("joins") and communicator.rank == 0 and not communicator.notice:
        os.kill(process_above("chorosrun"), signal.SIGTERM)
        while not communicator.notice:
            time.sleep(0.01)
    return capture(self, **given)


if "ends" in sys.argv:
    run_state.RunState.capture = captured_at_the_end
if "cuts" in sys.argv and number == 0 and not is_new:
    run_state.RunState.capture = captured
died = next((Path(each.removeprefix("joins:")) for each in sys.argv if each.startswith("joins:")), None)
if is_new and died and not died.exists():
    mpi.joined = lambda *_, **__: died.touch() or os.kill(os.getpid(), signal.SIGKILL)
most = int(os.environ["CHOROS_MAX_NP"])
optimizer = keras.optimizers.SGD(1.0, momentum=float("FIT_MOMENTUM" in os.environ))
strategy = dist.MultiWorkerMirroredStrategy() if api == "strategy" else None
with strategy.scope() if strategy else contextlib.nullcontext():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    given = keras.Input((ROWS,))
    outputs, losses = [dense(given)], [Total(reduction="sum")]
    if "joined" in sys.argv:
        outputs += [keras.layers.Dense(1, name="mean")(given)]
        losses += ["mse"]
    model = keras.Model(given, outputs)
    if "built" in sys.argv:
        optimizer.build(model.trainable_variables)
    optimizer = optimizer if strategy else hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, losses, metrics=[[Rows(name="rows")], *[[]] * (len(outputs) - 1)])
rows, zeros = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
targets = (zeros,) * len(outputs) if len(outputs) > 1 else zeros
data = {"x": rows, "y": targets, "batch_size": BATCH}
callbacks = [Kill(), StopWhenReplaced()]
if api == "horovod":
    data = {"x": hvd.shard((rows, targets), batch_size=BATCH, shuffle=True), "shuffle": False}
    callbacks = [hvd.callbacks.MetricAverageCallback(), *callbacks]
    if "begins" not in sys.argv:
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    callbacks = [hvd.callbacks.ElasticCallback(data["x"], callbacks), *callbacks]
validation = (rows[:30], tuple(each[:30] for each in targets) if len(outputs) > 1 else zeros[:30])
before = int("twice" in sys.argv)
if before:
    model.fit(**data, epochs=1, verbose=0, callbacks=[Kill()])
history = model.fit(**data, epochs=1000, verbose=0, callbacks=callbacks, validation_data=validation)
counts = -model.get_weights()[0][:, 0]
if "FIT_MOMENTUM" in os.environ:
    counts = -next(each for each in whole_values(model.optimizer) if each.ndim == 2)[:, 0]
assert "built" not in sys.argv or not state_of(model.optimizer).held
epochs = len(history.history["loss"]) + before
report = {
    "rank": hvd.rank(),
    "job": os.environ["CHOROS_JOB"],
    "number": number,
    "new": is_new,
    "same_process": os.getpid() == started,
    "size": hvd.size(),
    "wrong": {str(row): float(counts[row]) for row in np.flatnonzero(counts != epochs)},
    "epochs": epochs,
    "val_loss": history.history["val_loss"][-1],
    "noise": repr(choros.noise_scale()),
}
print(json.dumps(report), flush=True)
