"""The models in Keras, and ``fit`` as a task: the same for every contender that trains with Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import keras

from choros.bench.cases import MODELS, TrainCase
from choros.bench.channel import Task
from choros.bench.workers.examples import CLASSES, examples

__all__ = ["build", "compiled", "dataset", "fit_task"]


def build(name: str) -> tuple[Any, Any, str]:
    """The model, its optimizer and its loss.

    ``cnn`` is that of ``examples/mnist_horovod.py``, with 1.2 million parameters; ``mlp`` has 20 million, so
    that little is computed for each byte that is communicated.
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
    """The model, compiled with its optimizer, which ``wrap`` may replace."""
    model, optimizer, loss = build(name)
    model.compile(wrap(optimizer), loss)
    return model


def dataset(case: TrainCase, batch: int) -> Any:
    """Batches without end, as ``tf.data``."""
    import tensorflow as tf

    steps = 16
    images, labels = examples(case, steps * batch)
    batches = images.reshape(steps, batch, *images.shape[1:]), labels.reshape(steps, batch)
    return tf.data.Dataset.from_tensor_slices(batches).repeat()


def fit_task(model: Any, case: TrainCase, batch: int, callbacks: Sequence[Any] = (), *, alone: bool = False) -> Task:
    """``model.fit`` as a task, a unit being a step: on ``tf.data`` with TensorFlow, on arrays elsewhere.

    With TensorFlow the function that ``fit`` has made of the training step is called in a loop: ``fit`` itself takes
    up to half a second after its last step to give its iterator back.

    Args:
        model: compiled.
        case: what it is trained on.
        batch: examples that this process gives it a step.
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
