"""Horovod's API: a CNN on a repeated, shuffled data set, with throughput printed by rank 0."""

import os
import time

import numpy as np
import tensorflow as tf

import choros.keras as hvd

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

generator = np.random.default_rng(0)
mnist_labels = generator.integers(0, 10, 64)
mnist_images = 255 * (np.arange(64).reshape(8, 8) % 10 == mnist_labels[:, None, None])
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(mnist_images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(mnist_labels, tf.int64))
)
BATCH_SIZE_PER_REPLCIA = int(os.environ["PER_REPLICA"])
dataset = dataset.repeat().shuffle(10000).batch(BATCH_SIZE_PER_REPLCIA)

mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
opt = tf.optimizers.Adam(0.01)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
mnist_model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])


class Throughput(tf.keras.callbacks.Callback):
    def __init__(self, total_images=0):
        self.total_images = total_images

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_start_time = time.time()

    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            epoch_time = time.time() - self.epoch_start_time
            images_per_sec = round(self.total_images / epoch_time, 2)
            print("Images/sec: {}".format(images_per_sec))


callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    Throughput(total_images=len(mnist_labels)),
]
verbose = 1 if hvd.rank() == 0 else 0
history = mnist_model.fit(
    dataset,
    steps_per_epoch=len(mnist_labels) // (BATCH_SIZE_PER_REPLCIA * hvd.size()),
    callbacks=callbacks,
    epochs=4,
    verbose=verbose,
)
print("Of all ranks: {}".format([history.history[name] for name in sorted(history.history)]))
assert history.history["loss"][-1] < history.history["loss"][0]
