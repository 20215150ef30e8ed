"""A variational autoencoder whose whole loss is added by the model: ``fit`` receives no targets.

The noise is a function of the rows, so that each row has the same on every road.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import Road
from others.trained import JIT, Trained, weights_of

FEATURES, LATENT = 6, 2


class Sampling(layers.Layer):
    """Draws a latent vector, and adds the divergence of its distribution."""

    def call(self, inputs):
        x, mean, log_variance = inputs
        divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        self.add_loss(-0.5 * ops.mean(ops.sum(divergence, axis=1)))
        return mean + ops.exp(0.5 * log_variance) * ops.cos(9 * x[:, :LATENT])


class VAE(keras.Model):
    """Encoder, sampling and decoder."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3))
        self.mean, self.log_variance = layers.Dense(LATENT), layers.Dense(LATENT)
        self.sampling = Sampling()
        self.decoder = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(FEATURES)])

    def call(self, x):
        hidden = self.hidden(x)
        decoded = self.decoder(self.sampling([x, self.mean(hidden), self.log_variance(hidden)]))
        self.add_loss(ops.mean(ops.sum(ops.square(x - decoded), axis=1)))
        return decoded


def train(road: Road) -> Trained:
    x = np.random.default_rng(0).normal(size=(37, FEATURES)).astype("float32")
    with road.scope():
        model = VAE()
        model.compile(road.optimizer(keras.optimizers.Adam(0.02)), jit_compile=JIT)
    history = road.fit(model, x, batch_size=12, epochs=3)
    return Trained(weights_of(model), history)
