"""Distillation: a student learns from labels, and from a teacher that is a moving average of the student."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import Road
from others.train_steps import OwnStep
from others.trained import JIT, Trained, weights_of

FEATURES, CLASSES = 6, 4
MOMENTUM, TEMPERATURE, ALPHA = 0.9, 2.0, 0.3


def network() -> keras.Model:
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)])


class Distiller(OwnStep):
    """Trains ``student``; ``teacher`` follows."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network()
        self.teacher.trainable = False
        self.teacher.set_weights(self.student.get_weights())
        self.classification = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.imitation = keras.losses.KLDivergence()

    def call(self, x, training=False):
        return self.student(x, training=training)

    def loss_of(self, data):
        x, y = data
        logits = self.student(x, training=True)
        soft = ops.softmax(self.teacher(x, training=False) / TEMPERATURE)
        imitation = self.imitation(soft, ops.softmax(logits / TEMPERATURE))
        return ALPHA * self.classification(y, logits) + (1 - ALPHA) * TEMPERATURE**2 * imitation

    def after_update(self):
        for ours, theirs in zip(self.teacher.weights, self.student.weights, strict=True):
            ours.assign(MOMENTUM * ours + (1 - MOMENTUM) * theirs)


def train(road: Road) -> Trained:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(25, FEATURES)).astype("float32"), generator.integers(0, CLASSES, 25).astype("int32")
    with road.scope():
        model = Distiller()
        model.compile(road.optimizer(keras.optimizers.Adam(0.02)), jit_compile=JIT)
    history = road.fit(model, (x, y), batch_size=12, epochs=3)
    return Trained(weights_of(model), history)
