"""Keras' ``fit``: by choros, plain, with ``keras.distribution`` and with ``tf.distribute.MirroredStrategy``; and the
models of all contenders that train with Keras.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import keras

from choros.bench.cases import CLASSES, EXAMPLES, TrainCase, batches
from choros.bench.channel import Prepare, Task, serve_one_of


def choros(shard_state: str = "") -> Prepare:
    """Trains on the ranks of the job, with the distributed optimizer and choros' callbacks."""
    import choros.keras as hvd

    distributed = partial(hvd.DistributedOptimizer, shard_state=bool(shard_state))
    hvd.init()
    hvd.pin_device()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        model = compiled(case.model, distributed)
        # Weights are broadcast once per training, which consists of many calls of fit here.
        fit_task(model, case, case.batch, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]).run(1)
        return fit_task(model, case, case.batch, [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.Throughput()])

    return prepare


def plain() -> Prepare:
    """Trains in each process independently."""

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        return fit_task(compiled(case.model), case, case.batch)

    return prepare


def distribution() -> Prepare:
    """Trains on JAX on several processes, if the environment names any, or on several devices of one."""
    import jax

    if "KERAS_DISTRIBUTION_JOB_ADDRESSES" in os.environ:
        keras.distribution.initialize()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()  # also of the distribution
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
        model = compiled(case.model)

        def check() -> None:
            devices = len(model.trainable_variables[0].value.sharding.device_set)
            if devices != jax.device_count():
                raise RuntimeError(f"the model is on {devices} of {jax.device_count()} devices")

        return replace(fit_task(model, case, case.batch * jax.local_device_count()), check=check)

    return prepare


def mirrored(devices: str) -> Prepare:
    """Trains on logical devices into which it divides the CPU."""
    import tensorflow as tf

    number = int(devices)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(number)])

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        with strategy.scope():
            model = compiled(case.model)
        return fit_task(model, case, case.batch * number)

    return prepare


def build(name: str) -> tuple[Any, Any]:
    """Model and optimizer: ``cnn`` of ``examples/mnist_horovod.py``; ``mlp`` or ``mlp-adam``, of 20 million weights."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    shape = keras.Input(EXAMPLES[name])
    if name == "cnn":
        convolutions = [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu")]
        pooled = [layers.MaxPooling2D(2), layers.Dropout(0.25), layers.Flatten()]
        dense = [layers.Dense(128, activation="relu"), layers.Dropout(0.5)]
        model = keras.Sequential([shape, *convolutions, *pooled, *dense, layers.Dense(CLASSES, activation="softmax")])
        return model, keras.optimizers.Adam()
    hidden = [layers.Dense(4096, activation="relu"), layers.Dense(4096, activation="relu")]
    model = keras.Sequential([shape, *hidden, layers.Dense(CLASSES, activation="softmax")])
    return model, keras.optimizers.Adam() if name == "mlp-adam" else keras.optimizers.SGD(0.01)


def compiled(name: str, wrap: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    """Returns the model, compiled with its optimizer as returned by ``wrap``."""
    model, optimizer = build(name)
    model.compile(wrap(optimizer), "sparse_categorical_crossentropy")
    return model


def dataset(case: TrainCase, batch: int) -> Any:
    """Returns an infinite ``tf.data`` data set of batches."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(batches(case, 16, batch)).repeat()


def fit_task(model: Any, case: TrainCase, batch: int, callbacks: Sequence[Any] = ()) -> Task:
    """Returns ``model.fit`` as a task whose unit is a step: on ``tf.data`` with TensorFlow, on arrays otherwise.
    With TensorFlow it calls the train function ``fit`` compiled: ``fit`` takes up to 0.5 s to release its iterator.
    """
    if keras.backend.backend() == "tensorflow":
        data = dataset(case, batch)
        model.fit(data, steps_per_epoch=1, callbacks=list(callbacks), verbose=0)
        iterator = iter(model.distribute_strategy.experimental_distribute_dataset(data))

        def fit(steps: int) -> Any:
            for _ in range(steps):
                model.train_function(iterator)

    else:

        @lru_cache(maxsize=1)
        def examples(steps: int) -> Any:
            (images,), (labels,) = batches(case, 1, steps * batch)
            return images, labels

        def fit(steps: int) -> Any:
            return model.fit(*examples(steps), batch_size=batch, shuffle=False, callbacks=list(callbacks), verbose=0)

    return Task(fit)


if __name__ == "__main__":
    serve_one_of(choros, plain, distribution, mirrored)
