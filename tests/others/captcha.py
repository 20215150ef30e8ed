"""Reading sequences with CTC: a layer at the end adds a loss for each row; ``fit`` has no targets."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import Road
from others.trained import JIT, Trained, weights_of

STEPS, FEATURES, CHARACTERS, LENGTH = 7, 4, 5, 3


class CTC(layers.Layer):
    """Adds the loss of the labels, one number for each row; returns the predictions."""

    def call(self, labels, predictions):
        rows = ops.ones_like(labels[:, 0])
        losses = ops.ctc_loss(labels, predictions, LENGTH * rows, STEPS * rows, mask_index=0)
        self.add_loss(losses)
        return predictions


def train(road: Road) -> Trained:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(25, STEPS, FEATURES)).astype("float32")
    labels = generator.integers(1, CHARACTERS, (25, LENGTH)).astype("int32")
    with road.scope():
        image, label = keras.Input((STEPS, FEATURES), name="image"), keras.Input((LENGTH,), dtype="int32", name="label")
        x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(image)
        model = keras.Model({"image": image, "label": label}, CTC()(label, layers.Dense(CHARACTERS)(x)))
        model.compile(road.optimizer(keras.optimizers.SGD(0.01, momentum=0.9)), jit_compile=JIT)
    history = road.fit(model, {"image": images, "label": labels}, batch_size=12, epochs=2)
    return Trained(weights_of(model), history)
