"""TensorFlow's custom training loops: with Horovod's distributed tape of choros, and with ``tf.distribute``."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from choros.bench.channel import Prepare, Task, serve_one_of
from choros.bench.processes.keras_fit import build, dataset


def tape() -> Prepare:
    """Trains on the ranks of the job."""
    import choros.tensorflow as hvd
    from choros.training.device import pin_device

    hvd.init()
    pin_device()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        model, optimizer = build(case.model)
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

        return _loop(step, iter(dataset(case, case.batch)))

    return prepare


def multi_worker() -> Prepare:
    """``MultiWorkerMirroredStrategy`` on the processes in ``TF_CONFIG``; its ``fit`` fails under Keras 3."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        with strategy.scope():
            model, optimizer = build(case.model)
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

        return _loop(step, iter(strategy.distribute_datasets_from_function(lambda _context: dataset(case, case.batch))))

    return prepare


def _loop(step: Callable[[Any], Any], batches: Any) -> Task:
    def run(units: int) -> None:
        for _ in range(units):
            value = step(batches)
        float(value)

    return Task(run)


if __name__ == "__main__":
    serve_one_of(tape, multi_worker)
