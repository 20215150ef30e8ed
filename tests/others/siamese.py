"""A siamese network: a data set of triples, and a step of its own with a triplet loss for each of them."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import BACKEND, Road
from others.train_steps import OwnStep
from others.trained import JIT, Trained, weights_of

FEATURES, BATCH, ROWS = 6, 12, 33


class Siamese(OwnStep):
    """Learns embeddings in which anchors are nearer to positives than to negatives."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.built = True  # has no call()

    def loss_of(self, data):
        anchor, positive, negative = (self.embedding(each) for each in data)
        near, far = (ops.sum(ops.square(anchor - each), axis=-1) for each in (positive, negative))
        losses = ops.maximum(near - far + 0.5, 0.0)
        return losses if BACKEND == "tensorflow" else ops.mean(losses)


class Triples(keras.utils.PyDataset):
    """Batches of triples."""

    def __init__(self, arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        return tuple(each[index * BATCH : (index + 1) * BATCH] for each in self.arrays)


def triples(road: Road):
    generator = np.random.default_rng(0)
    arrays = tuple(generator.normal(size=(ROWS, FEATURES)).astype("float32") for _ in range(3))
    if BACKEND != "tensorflow":
        return road.share(Triples(arrays))
    import tensorflow as tf

    sets = tuple(map(tf.data.Dataset.from_tensor_slices, arrays))
    return road.share(tf.data.Dataset.zip(sets), BATCH, batched=False)


def train(road: Road) -> Trained:
    with road.scope():
        hidden, last = layers.Dense(8, activation="relu"), layers.Dense(3, use_bias=False)
        model = Siamese(keras.Sequential([keras.Input((FEATURES,)), hidden, last]))
        model.compile(road.optimizer(keras.optimizers.SGD(0.01)), jit_compile=JIT)
    history = road.fit(model, triples(road), epochs=2)
    return Trained(weights_of(model), history)
