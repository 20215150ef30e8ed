"""A masked language model: a transformer, and a step of its own with a loss for each token, zero if not masked."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import BACKEND, Road
from others.train_steps import OwnStep
from others.trained import JIT, Trained, weights_of

VOCABULARY, LENGTH, WIDTH, MASK = 11, 6, 8, 1
LOSS = keras.losses.SparseCategoricalCrossentropy(reduction=None, from_logits=True)


class MaskedLanguageModel(OwnStep):
    """Learns the tokens that were replaced by ``MASK``."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def call(self, tokens):
        return self.network(tokens)

    def loss_of(self, data):
        tokens, labels, weight = data
        losses = LOSS(labels, self.network(tokens, training=True), sample_weight=weight)
        return losses if BACKEND == "tensorflow" else ops.mean(losses)


def network() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(ops.arange(LENGTH))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, WIDTH // 2, use_bias=False)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH, activation="relu")(x))
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


def train(road: Road) -> Trained:
    generator = np.random.default_rng(0)
    labels = generator.integers(2, VOCABULARY, (33, LENGTH)).astype("int32")
    masked = generator.random(labels.shape) < 0.3
    tokens, weight = np.where(masked, MASK, labels).astype("int32"), masked.astype("float32")
    with road.scope():
        model = MaskedLanguageModel()
        model.compile(road.optimizer(keras.optimizers.SGD(0.01, momentum=0.9)), jit_compile=JIT)
    history = road.fit(model, (tokens, labels, weight), batch_size=16, epochs=2)
    return Trained(weights_of(model), history)
