"""A WGAN with gradient penalty: several updates of the critic in a step, by the gradient of a gradient.

On JAX, where a model's state has one optimizer, it is a loop of one's own.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import BACKEND, Road
from others.train_steps import minimize, pure_call
from others.trained import JIT, Trained, weights_of

FEATURES, LATENT, BATCH, EPOCHS, CRITIC_STEPS, PENALTY = 6, 3, 12, 2, 3, 10.0


def noise_of(images, number):
    """Returns the noise of the rows' ``number``-th step."""
    return ops.sin((5.0 + number) * images[:, :LATENT])


def between(real, fake):
    """Returns points between real and generated rows, by a number that each row determines."""
    return fake + (0.5 + 0.5 * ops.cos(9.0 * real[:, :1])) * (real - fake)


def networks():
    critic = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
    generator = keras.Sequential([keras.Input((LATENT,)), layers.Dense(8, activation="tanh"), layers.Dense(FEATURES)])
    return critic, generator


class WGAN(keras.Model):
    """Trains a critic several times, then a generator, on each batch."""

    def __init__(self, critic, generator):
        super().__init__()
        self.critic, self.generator = critic, generator
        if BACKEND == "torch":
            self.built = True  # has no call(); on TensorFlow Keras does not ask

    def compile(self, c_optimizer, g_optimizer, **arguments):
        super().compile(**arguments)
        self.c_optimizer, self.g_optimizer = c_optimizer, g_optimizer
        self.c_loss_metric = keras.metrics.Mean(name="c_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.c_loss_metric, self.g_loss_metric]

    def gradient_penalty(self, real, fake):
        points = between(real, fake)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                tape.watch(points)
                values = self.critic(points, training=True)
            gradients = tape.gradient(values, [points])[0]
        else:
            import torch

            points.requires_grad_()
            (gradients,) = torch.autograd.grad(self.critic(points, training=True).sum(), points, create_graph=True)
        return ops.mean(ops.square(ops.sqrt(ops.sum(ops.square(gradients), axis=1)) - 1.0))

    def train_step(self, real):
        if isinstance(real, (tuple, list)):  # as scripts have it that are for data sets, too
            real = real[0]
        for number in range(CRITIC_STEPS):
            fake = ops.stop_gradient(self.generator(noise_of(real, number), training=True))

            def critic_loss(fake=fake):
                wasserstein = ops.mean(self.critic(fake, training=True)) - ops.mean(self.critic(real, training=True))
                return wasserstein + PENALTY * self.gradient_penalty(real, fake)

            c_loss = minimize(critic_loss, self.critic.trainable_variables, self.c_optimizer)

        def generator_loss():
            return -ops.mean(self.critic(self.generator(noise_of(real, CRITIC_STEPS), training=True), training=True))

        g_loss = minimize(generator_loss, self.generator.trainable_variables, self.g_optimizer)
        self.c_loss_metric.update_state(c_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"c_loss": self.c_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def train(road: Road) -> Trained:
    images = np.random.default_rng(0).normal(size=(33, FEATURES)).astype("float32")
    if BACKEND == "jax":
        return train_in_a_loop(road, images)
    with road.scope():
        model = WGAN(*networks())
        optimizers = [road.optimizer(keras.optimizers.Adam(0.01, beta_1=0.5, beta_2=0.9)) for _ in range(2)]
        model.compile(*optimizers, jit_compile=JIT)
    history = road.fit(model, images, batch_size=BATCH, epochs=EPOCHS)
    return Trained(weights_of(model.critic, model.generator), history)


def train_in_a_loop(road: Road, images: np.ndarray) -> Trained:
    import jax
    import jax.numpy as jnp
    import optax

    with road.scope():
        critic, generator = networks()
    c_tx, g_tx = (road.optax(optax.adam(0.01, b1=0.5, b2=0.9), name) for name in ("critic", "generator"))
    c_weights, g_weights = ([each.value for each in network.trainable_variables] for network in (critic, generator))
    c_state, g_state = c_tx.init(c_weights), g_tx.init(g_weights)

    def value(c_weights, row):
        return pure_call(critic, c_weights, row[None])[0, 0]

    def critic_loss(c_weights, real, fake):
        gradients = jax.vmap(jax.grad(value, argnums=1), (None, 0))(c_weights, between(real, fake))
        penalties = (jnp.sqrt((gradients**2).sum(axis=1)) - 1.0) ** 2
        values = pure_call(critic, c_weights, fake) - pure_call(critic, c_weights, real)
        return road.average(values[:, 0] + PENALTY * penalties)

    def generator_loss(g_weights, c_weights, noise):
        return road.average(-pure_call(critic, c_weights, pure_call(generator, g_weights, noise))[:, 0])

    @jax.jit
    def update(c_weights, g_weights, c_state, g_state, real):
        for number in range(CRITIC_STEPS):
            fake = pure_call(generator, g_weights, noise_of(real, number))
            c_loss, gradients = jax.value_and_grad(critic_loss)(c_weights, real, fake)
            updates, c_state = c_tx.update(gradients, c_state, c_weights, examples=len(real))
            c_weights = optax.apply_updates(c_weights, updates)
        noise = noise_of(real, CRITIC_STEPS)
        g_loss, gradients = jax.value_and_grad(generator_loss)(g_weights, c_weights, noise)
        updates, g_state = g_tx.update(gradients, g_state, g_weights, examples=len(real))
        return c_weights, optax.apply_updates(g_weights, updates), c_state, g_state, c_loss + g_loss

    def step(real):
        nonlocal c_weights, g_weights, c_state, g_state
        c_weights, g_weights, c_state, g_state, loss = update(c_weights, g_weights, c_state, g_state, real)
        return loss

    losses = [road.run(step, batch) for _ in range(EPOCHS) for batch in road.batches([images], BATCH)]
    return Trained([np.asarray(each) for each in [*c_weights, *g_weights]], np.array(losses))
