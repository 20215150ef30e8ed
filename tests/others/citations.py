"""A graph network: the rows are nodes, by number; every process has the whole graph, and passes messages along it."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import Road
from others.trained import JIT, Trained, weights_of

NODES, EDGES, FEATURES, WIDTH, CLASSES = 20, 60, 5, 6, 3


class GraphConvolution(layers.Layer):
    """Adds to each node the weighted mean of its neighbours' messages."""

    def __init__(self, edges):
        super().__init__()
        self.edges = edges
        self.message, self.update = layers.Dense(WIDTH, activation="gelu"), layers.Dense(WIDTH, activation="gelu")

    def build(self, shape):
        self.message.build(shape)
        self.update.build((shape[0], 2 * WIDTH))

    def call(self, nodes):
        source, target = self.edges
        messages = ops.take(self.message(nodes), source, axis=0)
        sums = ops.segment_sum(messages, target, num_segments=NODES)
        counts = ops.segment_sum(ops.ones_like(messages[:, :1]), target, num_segments=NODES)
        return ops.normalize(self.update(ops.concatenate([nodes, sums / ops.maximum(counts, 1.0)], axis=1)))


class Classifier(keras.Model):
    """Classifies nodes of a graph."""

    def __init__(self, features, edges):
        super().__init__()
        self.features = features
        self.preprocess = layers.Dense(WIDTH, activation="gelu")
        self.convolutions = [GraphConvolution(edges) for _ in range(2)]
        self.classify = layers.Dense(CLASSES)

    def call(self, indices):
        x = self.preprocess(self.features)
        for convolution in self.convolutions:
            x = convolution(x) + x
        return self.classify(ops.take(x, ops.squeeze(indices, axis=-1), axis=0))


def train(road: Road) -> Trained:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(NODES, FEATURES)).astype("float32")
    edges = generator.integers(0, NODES, (2, EDGES)).astype("int32")
    nodes, classes = np.arange(17)[:, None], generator.integers(0, CLASSES, 17)
    with road.scope():
        model = Classifier(features, edges)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(road.optimizer(keras.optimizers.Adam(0.02)), loss, metrics=["accuracy"], jit_compile=JIT)
    history = road.fit(model, (nodes, classes), batch_size=8, epochs=3)
    return Trained(weights_of(model), history)
