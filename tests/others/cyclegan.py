"""A CycleGAN: four optimizers in one step, two and two of which train networks of the same shapes."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import BACKEND, Road
from others.train_steps import minimize
from others.trained import JIT, Trained, weights_of

FEATURES, BATCH = 5, 12
MSE, MAE = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()


def network(outputs: int) -> keras.Model:
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(6, activation="tanh"), layers.Dense(outputs)])


class CycleGAN(keras.Model):
    """Learns to translate from one kind of rows to another, and back, without pairs."""

    def __init__(self):
        super().__init__()
        self.forth, self.back = network(FEATURES), network(FEATURES)
        self.first_critic, self.second_critic = network(1), network(1)
        if BACKEND == "torch":
            self.built = True  # has no call(); on TensorFlow Keras does not ask

    @property
    def networks(self):
        return [self.forth, self.back, self.first_critic, self.second_critic]

    def compile(self, optimizers, **arguments):
        super().compile(**arguments)
        self.optimizers = optimizers
        self.trackers = [keras.metrics.Mean(name=f"loss_{number}") for number in range(4)]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        first, second = data

        def generators(real, other, there, back, critic):
            fake = there(real)
            judged = critic(fake)
            return MSE(ops.ones_like(judged), judged) + 10 * MAE(real, back(fake)) + 5 * MAE(other, there(other))

        def critics(real, other, there, critic):
            judged, fake = critic(real), critic(ops.stop_gradient(there(other)))
            return 0.5 * (MSE(ops.ones_like(judged), judged) + MSE(ops.zeros_like(fake), fake))

        losses = [
            lambda: generators(first, second, self.forth, self.back, self.second_critic),
            lambda: generators(second, first, self.back, self.forth, self.first_critic),
            lambda: critics(first, second, self.back, self.first_critic),
            lambda: critics(second, first, self.forth, self.second_critic),
        ]
        for loss, part, optimizer, tracker in zip(losses, self.networks, self.optimizers, self.trackers, strict=True):
            tracker.update_state(minimize(loss, part.trainable_variables, optimizer))
        return {tracker.name: tracker.result() for tracker in self.trackers}


def train(road: Road) -> Trained:
    generator = np.random.default_rng(0)
    first, second = (generator.normal(size=(25, FEATURES)).astype("float32") for _ in range(2))
    with road.scope():
        model = CycleGAN()
        optimizers = [road.optimizer(keras.optimizers.Adam(0.005, beta_1=0.5)) for _ in range(4)]
        model.compile(optimizers, jit_compile=JIT)
    history = road.fit(model, (first, second), batch_size=BATCH, epochs=2)
    return Trained(weights_of(*model.networks), history)
