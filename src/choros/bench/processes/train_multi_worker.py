"""``tf.distribute.MultiWorkerMirroredStrategy`` in a custom training loop, as ``fit`` fails under Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.keras_training import build, dataset


def join() -> Prepare:
    """Connects to the other processes, which ``TF_CONFIG`` lists."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        with strategy.scope():
            model, optimizer, _ = build(case.model)
            optimizer.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        global_batch = case.batch * strategy.num_replicas_in_sync

        def on_replica(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                value = tf.nn.compute_average_loss(
                    loss(labels, model(images, training=True)), global_batch_size=global_batch
                )
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return value

        @tf.function
        def step(iterator: Any) -> Any:
            values = strategy.run(on_replica, args=next(iterator))
            return strategy.reduce("SUM", values, axis=None)

        batches = iter(strategy.distribute_datasets_from_function(lambda _context: dataset(case, case.batch)))

        def run(units: int) -> None:
            for _ in range(units):
                value = step(batches)
            float(value)

        return Task(run)

    return prepare


if __name__ == "__main__":
    serve(join)
