"""An actor-critic loop: each row is an episode, played with the current policy; nothing of it is Keras' ``fit``.

An episode ends when its state leaves the interval, so episodes differ in length; their random numbers are data.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import BACKEND, Road
from others.train_steps import pure_call
from others.trained import Trained, weights_of

STEPS, EPISODES, BATCH, GAMMA, WIDTH = 6, 9, 4, 0.9, 2


def network() -> keras.Model:
    state = keras.Input((2,))
    common = layers.Dense(8, activation="relu")(state)
    return keras.Model(state, [layers.Dense(1)(common), layers.Dense(1)(common)])


def losses_of(play, starts, draws):
    """Returns the loss of each episode: of the policy's choices, and of the expected rewards.

    Args:
        play: from states to the logit of a step to the right, and the value of the state.
        starts: the first states.
        draws: a number from 0 to 1 for each step of each episode.
    """
    state, alive = starts, ops.ones_like(starts[:, 0])
    chances, values, rewards, lives = [], [], [], []
    for number in range(STEPS):
        logit, value = (each[:, 0] for each in play(state))
        right = ops.cast(draws[:, number] < ops.sigmoid(logit), "float32")
        chances.append(right * logit - ops.softplus(logit))
        values.append(value)
        lives.append(alive)
        position, speed = state[:, 0], state[:, 1] + 0.6 * (2 * right - 1)
        state = ops.stack([position + speed, speed], axis=1)
        alive = alive * ops.cast(ops.abs(position + speed) < WIDTH, "float32")
        rewards.append(alive)
    gain, losses = 0.0, 0.0
    for chance, value, reward, life in reversed(list(zip(chances, values, rewards, lives, strict=True))):
        gain = reward + GAMMA * gain
        advantage = ops.stop_gradient(gain - value)
        losses += life * (-chance * advantage + ops.square(value - gain))
    return losses


def train(road: Road) -> Trained:
    generator = np.random.default_rng(0)
    starts = generator.uniform(-1, 1, (EPISODES, 2)).astype("float32")
    draws = generator.uniform(size=(EPISODES, STEPS)).astype("float32")
    step, weights = {"tensorflow": tensorflow_loop, "torch": torch_loop, "jax": jax_loop}[BACKEND](road)
    losses = [road.run(step, batch) for _ in range(3) for batch in road.batches([starts, draws], BATCH)]
    return Trained(weights(), np.array(losses))


def tensorflow_loop(road: Road):
    import tensorflow as tf

    with road.scope():
        model, optimizer = network(), keras.optimizers.Adam(0.02)

    def step(starts, draws):
        with tf.GradientTape() as tape:
            loss = road.average(losses_of(model, starts, draws))
        gradients = road.gradient(tape, loss, model.trainable_variables, len(starts))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step, lambda: weights_of(model)


def torch_loop(road: Road):
    import torch

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.common, self.actor = torch.nn.Linear(2, 8), torch.nn.Linear(8, 1)
            self.critic = torch.nn.Linear(8, 1)

        def forward(self, state):
            common = torch.relu(self.common(state))
            return self.actor(common), self.critic(common)

    model = Network()
    optimizer = road.torch(torch.optim.Adam(model.parameters(), lr=0.02), model)

    def step(starts, draws):
        optimizer.zero_grad()
        loss = road.average(losses_of(model, torch.as_tensor(starts), torch.as_tensor(draws)))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda: [each.detach().numpy() for each in model.parameters()]


def jax_loop(road: Road):
    import jax
    import optax

    with road.scope():
        model = network()
    tx = road.optax(optax.adam(0.02))
    weights = [each.value for each in model.trainable_variables]
    state = tx.init(weights)

    def loss_of(weights, starts, draws):
        return road.average(losses_of(lambda states: pure_call(model, weights, states), starts, draws))

    @jax.jit
    def update(weights, state, starts, draws):
        loss, gradients = jax.value_and_grad(loss_of)(weights, starts, draws)
        updates, state = tx.update(gradients, state, weights, examples=len(starts))
        return optax.apply_updates(weights, updates), state, loss

    def step(starts, draws):
        nonlocal weights, state
        weights, state, loss = update(weights, state, starts, draws)
        return loss

    return step, lambda: list(map(np.asarray, weights))
