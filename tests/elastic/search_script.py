"""A search over learning rates: three calls of fit, or of a function of ``elastic.run``; rank 1 is killed in the first.
The new rank comes when the others are in the last, which waits for it, and has their results of the calls before.

Arguments: ``strategy``, ``horovod`` or ``run``; a directory. Prints, as JSON, the results of each call but the last.
All calls of fit validate with one ``PyDataset``, in a new order each time.
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

import choros
import choros.distribute as dist
import choros.keras as hvd
from choros.comm import global_process_set

api, directory = sys.argv[1], Path(sys.argv[2])
choros.init()
is_new, number, size = global_process_set.communicator.is_new, choros.rank(), choros.size()
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
rates, results = (0.01, 0.02, 0.03), []


class HeldOut(keras.utils.PyDataset):
    order = np.arange(20)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = self.order[index * 10 : index * 10 + 10]
        return x[rows], rows[:, None].astype("float32")

    def on_epoch_end(self):
        self.order = np.random.default_rng(self.order).permutation(20)


class Labels(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true)


held_out = HeldOut()


class Ends(keras.callbacks.Callback):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def on_train_batch_begin(self, batch, logs=None):
        if number == 1 and not is_new and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch >= 1 and (self.number < 2 or choros.size() == size)


def fit(number, rate):
    strategy = dist.MultiWorkerMirroredStrategy() if api == "strategy" else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(rate)
        optimizer = optimizer if strategy else hvd.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse", metrics=[Labels(name="sum")])
    validation = held_out if strategy else hvd.shard(held_out)
    options = {"epochs": 1000, "verbose": 0, "callbacks": [Ends(number)], "validation_data": validation}
    if strategy:
        history = model.fit(x, x[:, :1], batch_size=12, **options)
        evaluated = [model.evaluate(x, x[:, :1], verbose=0), model.predict(x, verbose=0).tolist()]
    else:
        data, evaluated = hvd.shard((x, x[:, :1]), batch_size=12, shuffle=True), []
        own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        options["callbacks"] = [hvd.callbacks.ElasticCallback(data, own), *own, *options["callbacks"]]
        history = model.fit(data, shuffle=False, **options)
    assert set(history.history["val_sum"]) == {190}, "not each row was evaluated once"
    return [history.history, history.epoch, *evaluated]


@hvd.elastic.run
def train(state, number, rate):
    while state.steps < 3 or (number == 2 and choros.size() < size):
        if choros.rank() == 1 and not is_new and state.steps == 1 and number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        state.steps += 1
        state.commit()
    return {"rate": rate, "trained": np.full(2, state.steps)}


while is_new and not (directory / "ended").exists():
    time.sleep(0.02)
for call, rate in enumerate(rates):
    if api == "run":
        result = train(hvd.elastic.ObjectState(steps=0), call, rate)
        result = {name: np.asarray(each).tolist() for name, each in result.items()}
    else:
        result = fit(call, rate)
    results.append(result)
    if call == 1 and not is_new:
        (directory / "ended").touch()
print(json.dumps({"new": is_new, "size": choros.size(), "results": results[:2]}), flush=True)
