"""Handwritten digits with Horovod's elastic Keras API: the training goes on when processes are lost or join.

::

    horovodrun -np 4 --min-np 2 python tensorflow2_keras_mnist_elastic.py
"""

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.npz"


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a small convolutional network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120, help="of all processes in an epoch (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.001, help="of one process (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=DIGITS, help="images and labels (default: %(default)s)")
    return parser.parse_args()


def main():
    args = parse_arguments()
    hvd.init()

    digits = np.load(args.data)
    images = (digits["images"][..., None] / 16).astype("float32")
    labels = digits["labels"]
    held_out = np.arange(len(images)) % 6 == 0
    dataset = tf.data.Dataset.from_tensor_slices((images[~held_out], labels[~held_out]))
    dataset = dataset.repeat().shuffle(2000).batch(32)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.Adam(args.lr * hvd.size()), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(
        optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], experimental_run_tf_function=False
    )

    # A step creates the variables, so that they can be synchronised.
    model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    def on_state_reset():
        print(f"Process {hvd.rank()} of {hvd.size()} goes on", flush=True)
        state.model.optimizer.learning_rate.assign(args.lr * hvd.size())
        state.model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)  # together with processes that are new

    state.register_reset_callbacks([on_state_reset])

    @hvd.elastic.run
    def train(state):
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ]
        state.model.fit(
            dataset,
            steps_per_epoch=args.steps // hvd.size(),
            epochs=args.epochs - state.epoch,
            callbacks=callbacks,
            verbose=2 if hvd.rank() == 0 else 0,
        )

    train(state)
    loss, accuracy = hvd.allreduce(model.evaluate(images[held_out], labels[held_out], verbose=0))
    if hvd.rank() == 0:
        print(f"Held-out loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
