"""A GAN: two networks and two optimizers in one training step of a model without ``call``; ``fit`` has no targets.

On JAX, where a model's state has one optimizer, it is a loop of one's own. Each row determines its noise.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import BACKEND, Road
from others.train_steps import minimize, pure_call
from others.trained import JIT, Trained, weights_of

FEATURES, LATENT, BATCH, EPOCHS = 6, 3, 12, 3
LOSS = keras.losses.BinaryCrossentropy(from_logits=True)


def noise_of(images, scale=7.0):
    return ops.sin(scale * images[:, :LATENT])


def networks():
    discriminator = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8), layers.LeakyReLU(negative_slope=0.2), layers.Dense(1)]
    )
    generator = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(8, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dense(FEATURES),
        ]
    )
    return discriminator, generator


class GAN(keras.Model):
    """Trains a discriminator, then a generator, on each batch."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        if BACKEND == "torch":
            self.built = True  # has no call(); on TensorFlow Keras does not ask

    def compile(self, d_optimizer, g_optimizer, loss_fn, **arguments):
        super().compile(**arguments)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        if isinstance(real, (tuple, list)):  # as scripts have it that are for data sets, too
            real = real[0]
        rows = ops.shape(real)[0]
        images = ops.concatenate([ops.stop_gradient(self.generator(noise_of(real))), real])
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])

        def d_loss():
            return self.loss_fn(labels, self.discriminator(images))

        def g_loss():
            return self.loss_fn(ops.zeros((rows, 1)), self.discriminator(self.generator(noise_of(real, 5.0))))

        d_loss = minimize(d_loss, self.discriminator.trainable_weights, self.d_optimizer)
        g_loss = minimize(g_loss, self.generator.trainable_weights, self.g_optimizer)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def train(road: Road) -> Trained:
    images = np.random.default_rng(0).normal(size=(25, FEATURES)).astype("float32")
    if BACKEND == "jax":
        return train_in_a_loop(road, images)
    with road.scope():
        model = GAN(*networks())
        optimizers = [road.optimizer(keras.optimizers.Adam(0.01, beta_1=0.5)) for _ in range(2)]
        model.compile(*optimizers, LOSS, jit_compile=JIT)
    history = road.fit(model, images, batch_size=BATCH, epochs=EPOCHS)
    return Trained(weights_of(model.discriminator, model.generator), history)


def train_in_a_loop(road: Road, images: np.ndarray) -> Trained:
    import jax
    import optax

    with road.scope():
        discriminator, generator = networks()
    transformations = [road.optax(optax.adam(0.01, b1=0.5), name) for name in ("discriminator", "generator")]
    weights = [[each.value for each in network.trainable_variables] for network in (discriminator, generator)]
    states = [tx.init(each) for tx, each in zip(transformations, weights, strict=True)]

    def d_loss(d_weights, g_weights, real):
        fake = pure_call(discriminator, d_weights, pure_call(generator, g_weights, noise_of(real)))
        losses = jax.nn.softplus(-fake) + jax.nn.softplus(pure_call(discriminator, d_weights, real))
        return road.average(losses[:, 0])

    def g_loss(g_weights, d_weights, real):
        fake = pure_call(discriminator, d_weights, pure_call(generator, g_weights, noise_of(real, 5.0)))
        return road.average(jax.nn.softplus(fake)[:, 0])

    @jax.jit
    def update(weights, states, real):
        weights, states, total = list(weights), list(states), 0.0
        for own, loss_of in enumerate((d_loss, g_loss)):
            loss, gradients = jax.value_and_grad(loss_of)(weights[own], weights[1 - own], real)
            updates, states[own] = transformations[own].update(gradients, states[own], weights[own], examples=len(real))
            weights[own] = optax.apply_updates(weights[own], updates)
            total += loss
        return weights, states, total

    def step(real):
        nonlocal weights, states
        weights, states, loss = update(weights, states, real)
        return loss

    losses = [road.run(step, batch) for _ in range(EPOCHS) for batch in road.batches([images], BATCH)]
    return Trained([np.asarray(each) for network in weights for each in network], np.array(losses))
