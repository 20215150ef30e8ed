"""Handwritten digits with Horovod's Keras API, on TensorFlow, PyTorch or JAX.

::

    horovodrun -np 2 python keras_mnist.py
    KERAS_BACKEND=torch horovodrun -np 2 python keras_mnist.py --fp16-allreduce
"""

import argparse
from pathlib import Path

import keras
import numpy as np

import horovod.keras as hvd

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.npz"


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.001, help="of one process (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DIGITS, help="images and labels (default: %(default)s)")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in float16")
    parser.add_argument("--checkpoint", type=Path, help="the file .keras to which the first process saves each epoch")
    return parser.parse_args()


def read_digits(path):
    """Returns the images and labels for training, and those that are held out: every sixth digit."""
    digits = np.load(path)
    images = (digits["images"][..., None] / 16).astype("float32")
    held_out = np.arange(len(images)) % 6 == 0
    return (images[~held_out], digits["labels"][~held_out]), (images[held_out], digits["labels"][held_out])


def pin_gpu(index):
    """Lets TensorFlow see one GPU: each process has its own."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[index], "GPU")


def main():
    args = parse_arguments()
    hvd.init()
    if keras.backend.backend() == "tensorflow":
        pin_gpu(hvd.local_rank())

    # Each process drops other units, and trains on its own part of the data.
    keras.utils.set_random_seed(hvd.rank())
    (images, labels), test = read_digits(args.data)
    part = slice(hvd.rank(), None, hvd.size())

    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    rate = args.lr * hvd.size()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(rate),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
    ]
    if hvd.rank() == 0 and args.checkpoint:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
    model.fit(
        images[part],
        labels[part],
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=callbacks,
        validation_data=test,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    loss, accuracy = hvd.allreduce(model.evaluate(*test, verbose=0))
    if hvd.rank() == 0:
        print(f"Held-out loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
