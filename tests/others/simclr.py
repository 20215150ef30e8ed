"""Semi-supervised SimCLR: batches of two data sets, with more unlabelled than labelled rows, and two optimizers.

In SimCLR the negatives of a row are all other rows of its batch, of which a rank has its own alone; here they are the
other patches of the same image, so that each row has its own loss.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from others.roads import BACKEND, Road
from others.train_steps import OwnStep, minimize
from others.trained import JIT, Trained, weights_of

PATCHES, FEATURES, WIDTH, CLASSES = 4, 5, 6, 3
UNLABELLED, LABELLED, ROWS, LABELS = 20, 4, 47, 9


def augmented(images, number):
    return images * (1 + 0.2 * ops.cos((3.0 + number) * images))


class SimCLR(OwnStep):
    """Trains an encoder on pairs of augmented patches, and a linear probe on the labels."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((PATCHES, FEATURES)), layers.Dense(WIDTH, activation="tanh")])
        self.projection = keras.Sequential([keras.Input((PATCHES, WIDTH)), layers.Dense(WIDTH)])
        self.probe = keras.Sequential([keras.Input((PATCHES, WIDTH)), layers.Flatten(), layers.Dense(CLASSES)])
        self.classification = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.built = True

    def compile(self, contrastive_optimizer, probe_optimizer, **arguments):
        super().compile(contrastive_optimizer, **arguments)
        if BACKEND != "jax":  # where one optimizer trains all
            self.probe_optimizer = probe_optimizer

    def contrastive_loss(self, data):
        """Returns a number for each row on TensorFlow, whose sum is minimized; a mean on the others."""
        unlabelled, (labelled, _) = data
        images = ops.concatenate([unlabelled, labelled])
        first, second = (
            ops.normalize(self.projection(self.encoder(augmented(images, number))), axis=-1) for number in range(2)
        )
        similarities = ops.matmul(first, ops.swapaxes(second, 1, 2)) / 0.2
        labels = ops.zeros_like(similarities[:, :, 0], "int32") + ops.arange(PATCHES)
        if BACKEND == "tensorflow":
            losses = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
            return ops.mean(losses, axis=1)
        return self.classification(labels, similarities)

    def probe_loss(self, data):
        _, (labelled, labels) = data
        return self.classification(labels, self.probe(self.encoder(labelled)))

    def loss_of(self, data):
        return self.contrastive_loss(data) + self.probe_loss(data)

    def train_step(self, *args):
        if BACKEND == "jax":
            return super().train_step(*args)
        (data,) = args
        weights = [*self.encoder.trainable_weights, *self.projection.trainable_weights]
        minimize(lambda: self.contrastive_loss(data), weights, self.optimizer)
        loss = minimize(lambda: self.probe_loss(data), self.probe.trainable_weights, self.probe_optimizer)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class Pairs(keras.utils.PyDataset):
    """Batches of both data sets."""

    def __init__(self, unlabelled, labelled, labels):
        super().__init__()
        self.arrays = (unlabelled, labelled, labels)

    def __len__(self):
        return -(-ROWS // UNLABELLED)

    def __getitem__(self, index):
        rows, labelled = (slice(index * size, (index + 1) * size) for size in (UNLABELLED, LABELLED))
        return self.arrays[0][rows], (self.arrays[1][labelled], self.arrays[2][labelled])


def data(road: Road):
    generator = np.random.default_rng(0)
    unlabelled, labelled = (generator.normal(size=(n, PATCHES, FEATURES)).astype("float32") for n in (ROWS, LABELS))
    labels = generator.integers(0, CLASSES, LABELS).astype("int32")
    if BACKEND != "tensorflow":
        return road.share(Pairs(unlabelled, labelled, labels))
    import tensorflow as tf

    sets = tuple(map(tf.data.Dataset.from_tensor_slices, (unlabelled, (labelled, labels))))
    return road.share(tf.data.Dataset.zip((sets[0].batch(UNLABELLED), sets[1].batch(LABELLED))), UNLABELLED)


def train(road: Road) -> Trained:
    with road.scope():
        model = SimCLR()
        optimizers = [road.optimizer(keras.optimizers.Adam(0.02)) for _ in range(2)]
        model.compile(*optimizers, jit_compile=JIT)
    history = road.fit(model, data(road), epochs=2)
    return Trained(weights_of(model), history)
