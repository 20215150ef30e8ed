"""choros: TensorFlow's custom training loop with Horovod's distributed tape."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import choros.tensorflow as hvd
from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.keras_training import build, dataset
from choros.training.device import pin_device


def join() -> Prepare:
    """Trains on the ranks of the job."""
    hvd.init()
    pin_device()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        model, optimizer, _ = build(case.model)
        loss = keras.losses.SparseCategoricalCrossentropy()
        optimizer.build(model.trainable_variables)
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

        @tf.function
        def step(batches: Any) -> Any:
            images, labels = next(batches)
            with tf.GradientTape() as tape:
                value = loss(labels, model(images, training=True))
            gradients = hvd.DistributedGradientTape(tape).gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return value

        batches = iter(dataset(case, case.batch))

        def run(units: int) -> None:
            for _ in range(units):
                value = step(batches)
            float(value)

        return Task(run)

    return prepare


if __name__ == "__main__":
    serve(join)
