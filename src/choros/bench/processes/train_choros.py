"""choros: Keras' ``fit`` with the distributed optimizer and choros' callbacks."""

from __future__ import annotations

from typing import Any

import keras

import choros.keras as hvd
from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.keras_training import compiled, fit_task


def join() -> Prepare:
    """Trains on the ranks of the job."""
    hvd.init()
    hvd.pin_device()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        model = compiled(case.model, hvd.DistributedOptimizer)
        # Weights are broadcast once per training, which consists of many calls of fit here.
        fit_task(model, case, case.batch, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]).run(1)
        return fit_task(model, case, case.batch, [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.Throughput()])

    return prepare


if __name__ == "__main__":
    serve(join)
