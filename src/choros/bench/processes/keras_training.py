"""The Keras models and ``fit`` as a task, for all contenders that train with Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import keras

from choros.bench.cases import MODELS, TrainCase
from choros.bench.channel import Task
from choros.bench.processes.examples import CLASSES, examples

__all__ = ["build", "compiled", "dataset", "fit_task"]


def build(name: str) -> tuple[Any, Any, str]:
    """Returns the model, its optimizer and its loss.

    ``cnn`` is the model of ``examples/mnist_horovod.py``, with 1.2 million parameters; ``mlp`` has 20 million, so
    that it computes little for each byte that it communicates.
    """
    layers = keras.layers
    keras.utils.set_random_seed(0)
    shape = keras.Input(MODELS[name].example)
    if name == "cnn":
        convolutions = [layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu")]
        pooled = [layers.MaxPooling2D(2), layers.Dropout(0.25), layers.Flatten()]
        dense = [layers.Dense(128, activation="relu"), layers.Dropout(0.5)]
        model = keras.Sequential([shape, *convolutions, *pooled, *dense, layers.Dense(CLASSES, activation="softmax")])
        return model, keras.optimizers.Adam(), "sparse_categorical_crossentropy"
    hidden = [layers.Dense(4096, activation="relu"), layers.Dense(4096, activation="relu")]
    model = keras.Sequential([shape, *hidden, layers.Dense(CLASSES, activation="softmax")])
    return model, keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy"


def compiled(name: str, wrap: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    """Returns the model, compiled with its optimizer as returned by ``wrap``."""
    model, optimizer, loss = build(name)
    model.compile(wrap(optimizer), loss)
    return model


def dataset(case: TrainCase, batch: int) -> Any:
    """Returns an infinite ``tf.data`` data set of batches."""
    import tensorflow as tf

    steps = 16
    images, labels = examples(case, steps * batch)
    batches = images.reshape(steps, batch, *images.shape[1:]), labels.reshape(steps, batch)
    return tf.data.Dataset.from_tensor_slices(batches).repeat()


def fit_task(model: Any, case: TrainCase, batch: int, callbacks: Sequence[Any] = (), *, alone: bool = False) -> Task:
    """Returns ``model.fit`` as a task whose unit is a step: on ``tf.data`` with TensorFlow, on arrays otherwise.

    With TensorFlow the task calls, in a loop, the train function that ``fit`` has compiled: ``fit`` itself takes up to
    half a second after its last step to release its iterator.

    Args:
        model: the compiled model.
        case: the case, with the model's name.
        batch: the number of examples of this process per step.
        callbacks: for ``fit``.
        alone: see ``Task``.
    """
    if keras.backend.backend() == "tensorflow":
        batches = dataset(case, batch)
        model.fit(batches, steps_per_epoch=1, callbacks=list(callbacks), verbose=0)
        iterator = iter(model.distribute_strategy.experimental_distribute_dataset(batches))

        def fit(steps: int) -> Any:
            for _ in range(steps):
                model.train_function(iterator)

    else:
        arrays = lru_cache(maxsize=1)(lambda steps: examples(case, steps * batch))

        def fit(steps: int) -> Any:
            return model.fit(*arrays(steps), batch_size=batch, shuffle=False, callbacks=list(callbacks), verbose=0)

    return Task(fit, alone=alone)
