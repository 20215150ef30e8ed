"""The Keras models and ``fit`` as a task, for all contenders that train with Keras."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import keras

from choros.bench.cases import CLASSES, EXAMPLES, TrainCase, batches
from choros.bench.channel import Task


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
