"""A stateful RNN: a row of a batch continues the sequence of the same row in the batch before, also over epochs.

Its layers have the number of a process's rows, so each batch is full; the states are those of these rows.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from others.roads import Road
from others.trained import JIT, Trained

SEQUENCES, STEPS, FEATURES, BATCHES = 6, 4, 3, 4


def train(road: Road) -> Trained:
    series = np.random.default_rng(0).normal(size=(SEQUENCES, BATCHES * STEPS, FEATURES)).astype("float32").cumsum(1)
    x = np.concatenate(np.split(series, BATCHES, axis=1))
    y = np.roll(x, -1, axis=1)[:, :, :1]
    with road.scope():
        inputs = keras.Input((STEPS, FEATURES), batch_size=SEQUENCES // road.ranks)
        hidden = layers.LSTM(4, return_sequences=True, stateful=True)(inputs)
        outputs = layers.Dense(1)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(road.optimizer(keras.optimizers.RMSprop(0.01)), "mse", jit_compile=JIT)
    history = road.fit(model, (x, y), batch_size=SEQUENCES, epochs=2)  # the second goes on where the first has ended
    model.layers[1].reset_states()
    return Trained(model.get_weights()[: len(model.trainable_variables)], history)
