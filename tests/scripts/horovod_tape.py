"""Horovod's API of TensorFlow 2: a CNN in a loop of one's own, with the distributed tape."""

import os

import numpy as np
import tensorflow as tf

import choros.tensorflow as hvd

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

generator = np.random.default_rng(0)
mnist_labels = generator.integers(0, 10, 192)
mnist_images = 255 * (np.arange(64).reshape(8, 8) % 10 == mnist_labels[:, None, None])
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(mnist_images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(mnist_labels, tf.int64))
)
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(int(os.environ["PER_REPLICA"]))

tf.keras.utils.set_random_seed(7)
mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
mnist_model.build((None, 8, 8, 1))
loss = tf.losses.SparseCategoricalCrossentropy()

# Adjusted to the number of processes.
opt = tf.optimizers.SGD(float(os.environ["RATE"]) * hvd.size(), momentum=0.9)

checkpoint_dir = "./checkpoints"
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    # Averages the gradients of all processes.
    tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))

    # After the first step, which has created the optimizer's variables.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)

    return hvd.allreduce(loss_value)


for batch, (images, labels) in enumerate(dataset.take(40)):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 10 == 0:
        print("Loss at step #%d: %.5f" % (batch, loss_value))

if hvd.rank() == 0:
    checkpoint.save(checkpoint_dir)
assert loss_value < 2
