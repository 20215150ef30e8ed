"""Handwritten digits with Horovod's TensorFlow API: a loop of one's own, with the distributed tape.

::

    horovodrun -np 2 python tensorflow2_mnist.py --steps 200
"""

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.npz"


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a small convolutional network on handwritten digits.")
    parser.add_argument("--steps", type=int, default=200, help="on one process; N take 1/N of them (default: 200)")
    parser.add_argument("--batch-size", type=int, default=32, help="of each process (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DIGITS, help="images and labels (default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, help="where the first process saves model and optimizer")
    return parser.parse_args()


def read_digits(path):
    """Returns the images and labels for training, and those that are held out: every sixth digit."""
    digits = np.load(path)
    images = (digits["images"][..., None] / 16).astype("float32")
    held_out = np.arange(len(images)) % 6 == 0
    return (images[~held_out], digits["labels"][~held_out]), (images[held_out], digits["labels"][held_out])


def main():
    args = parse_arguments()
    hvd.init()

    # Each process has a GPU of its own.
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    # Each process drops other units, and trains on its own part of the data.
    tf.keras.utils.set_random_seed(hvd.rank())
    train, (test_images, test_labels) = read_digits(args.data)
    batches = tf.data.Dataset.from_tensor_slices(train).shard(hvd.size(), hvd.rank())
    batches = batches.shuffle(2000).repeat().batch(args.batch_size)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(0.002 * hvd.size())

    @tf.function
    def step(images, labels, is_first):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        # The first step has created all variables: now those of the first process become everyone's.
        if is_first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for number, (images, labels) in enumerate(batches.take(args.steps // hvd.size())):
        loss = step(images, labels, number == 0)
        if number % 20 == 0 and hvd.rank() == 0:
            print(f"Step {number}: loss {float(loss):.4f}", flush=True)

    # Each process evaluates its part of the digits that are held out.
    part = slice(hvd.rank(), None, hvd.size())
    right = tf.argmax(model(test_images[part]), axis=1) == test_labels[part]
    right = hvd.allreduce(tf.reduce_sum(tf.cast(right, tf.float32)), op=hvd.Sum)
    if hvd.rank() == 0:
        print(f"Held-out accuracy {float(right) / len(test_labels):.4f}")
        if args.checkpoint_dir:
            checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
            print("Saved", checkpoint.save(str(args.checkpoint_dir / "digits")))


if __name__ == "__main__":
    main()
