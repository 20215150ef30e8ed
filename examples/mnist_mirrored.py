"""MNIST with ``fit`` under MirroredStrategy: tf.distribute's programming model on Keras 3.

On one process, on two, and on another framework::

    python examples/mnist_mirrored.py
    chorosrun -np 2 python examples/mnist_mirrored.py
    KERAS_BACKEND=torch chorosrun -np 2 python examples/mnist_mirrored.py --json figures.json

On a machine with eight GPUs, with MNIST itself (which Keras downloads) and 512 images on each of them::

    chorosrun -np 8 python examples/mnist_mirrored.py --dataset mnist --batch-size 512 --mixed-precision
    KERAS_BACKEND=jax python examples/mnist_mirrored.py --dataset mnist --batch-size 512      # one process, 8 devices

Without ``--dataset`` nothing is downloaded: the 1797 real handwritten digits of 8×8 pixels in
``digits.npz`` are enlarged to 28×28.

The callbacks log for TensorBoard (``tensorboard --logdir runs/mnist_mirrored/logs``), save the weights after each
epoch, lower the learning rate in steps, print it, and measure the throughput. Then the model is saved, loaded without
and with the strategy, and evaluated each time: the results agree. On TensorFlow it is also exported and served.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

import choros
from choros import distribute
from choros.keras import barrier
from choros.keras.callbacks import TensorBoard, Throughput

Examples: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]

FRAMEWORK = keras.backend.backend()


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    if args.mixed_precision:
        keras.config.set_dtype_policy("mixed_float16")

    strategy = distribute.MirroredStrategy()
    batch_size = args.batch_size * strategy.num_replicas_in_sync  # the global batch: the strategy splits it
    train, test = read_examples(args.dataset, args.limit)
    print_once(f"{len(train[0])} training and {len(test[0])} held-out images of {args.dataset}")
    print_once(
        f"{strategy.num_replicas_in_sync} replica(s) on {FRAMEWORK}, {args.batch_size} images per replica and step"
    )

    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )

    callbacks = [
        TensorBoard(args.save_dir / "logs"),
        keras.callbacks.ModelCheckpoint(args.save_dir / "ckpt_{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.LearningRateScheduler(decay),
        Throughput(total_images=len(train[0])),
    ]
    if choros.rank() == 0:
        callbacks.append(PrintLR())

    history = model.fit(
        **batches(train, batch_size, shuffle=True),
        validation_data=test,
        validation_batch_size=batch_size,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=2,
    )
    evaluations = {"trained": model.evaluate(**batches(test, batch_size), verbose=0)}

    path = args.save_dir / "model.keras"
    model.save(path)
    unreplicated = keras.models.load_model(path)
    evaluations["loaded without the strategy"] = unreplicated.evaluate(*test, batch_size=batch_size, verbose=0)
    with strategy.scope():
        replicated = keras.models.load_model(path)
    evaluations["loaded with the strategy"] = replicated.evaluate(**batches(test, batch_size), verbose=0)
    model.load_weights(args.save_dir / f"ckpt_{args.epochs}.weights.h5")
    evaluations["from the last checkpoint"] = model.evaluate(**batches(test, batch_size), verbose=0)

    for name, (loss, accuracy) in evaluations.items():
        print_once(f"{name:>27}: loss {loss:.4f}, accuracy {accuracy:.4f}")
        np.testing.assert_allclose([loss, accuracy], evaluations["trained"], rtol=1e-3, atol=1e-5)
    if FRAMEWORK == "tensorflow":
        serve(model, args.save_dir / "saved_model", test)
    report(args, strategy, history, evaluations["trained"], path, seconds=time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small convolutional network under MirroredStrategy.")
    add = parser.add_argument
    add("--epochs", type=int, default=12, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="examples per step and replica (default: %(default)s)")
    add("--dataset", choices=["digits", "mnist", "fashion_mnist"], default="digits", help="(default: %(default)s)")
    add("--limit", type=int, help="use at most this many training and this many held-out examples")
    add("--mixed-precision", action="store_true", help="compute in float16")
    add("--save-dir", type=Path, default="runs/mnist_mirrored", help="for logs and models (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    return parser.parse_args()


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


def decay(epoch: int) -> float:
    """Returns the learning rate of an epoch, counted from 0."""
    return 1e-3 if epoch < 3 else 1e-4 if epoch < 7 else 1e-5


class PrintLR(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:  # noqa: ARG002
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        print(f"Learning rate for epoch {epoch + 1} is {rate:.0e}", flush=True)


def batches(examples: Examples, batch_size: int, *, shuffle: bool = False) -> dict[str, Any]:
    """Returns global batches as arguments of ``fit`` and ``evaluate``: ``tf.data`` on TensorFlow, else arrays."""
    if FRAMEWORK != "tensorflow":
        return {"x": examples[0], "y": examples[1], "batch_size": batch_size}
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(examples)
    if shuffle:
        dataset = dataset.shuffle(len(examples[0]))
    return {"x": dataset.batch(batch_size)}


def read_examples(dataset: str, limit: int | None) -> tuple[Examples, Examples]:
    """Returns the training and the held-out examples: images with values from 0 to 1, and labels."""
    if dataset == "digits":
        train, test = read_digits()
    else:
        load_data = getattr(keras.datasets, dataset).load_data
        if choros.local_rank() == 0:
            load_data()  # one process per host downloads
        barrier()
        train, test = load_data()
    return tuple(
        ((images[:limit, ..., np.newaxis] / 255).astype(np.float32), labels[:limit].astype(np.int32))
        for images, labels in (train, test)
    )


def read_digits() -> tuple[Any, Any]:
    """Returns the digits in MNIST's shape and range; every sixth is held out."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    enlarged = np.kron(digits["images"] / 16 * 255, np.ones((1, 3, 3)))
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))
    held_out = np.arange(len(images)) % 6 == 0
    return (images[~held_out], digits["labels"][~held_out]), (images[held_out], digits["labels"][held_out])


def serve(model: keras.Model, path: Path, test: Examples) -> None:
    """Exports the model as a SavedModel, and compares its predictions with the model's."""
    import tensorflow as tf

    model.export(path, verbose=False)
    images = test[0][:8]
    server = tf.saved_model.load(path)
    np.testing.assert_allclose(server.serve(images), model.predict(images, verbose=0), rtol=1e-3, atol=1e-5)
    print_once(f"exported as {path}, with the same predictions")


def print_once(text: str) -> None:
    if choros.rank() == 0:
        print(text, flush=True)


def report(
    args: argparse.Namespace,
    strategy: distribute.Strategy,
    history: keras.callbacks.History,
    evaluation: Sequence[float],
    path: Path,
    seconds: float,
) -> None:
    epochs = rows(history)
    figures = {
        "example": "mnist_mirrored",
        "framework": FRAMEWORK,
        "ranks": choros.size(),
        "replicas": strategy.num_replicas_in_sync,
        "epochs": args.epochs,
        "loss": epochs[-1]["loss"],
        "held_out_loss": evaluation[0],
        "accuracy": evaluation[1],
        "images_per_s": statistics.harmonic_mean([epoch["images_per_s"] for epoch in epochs[1:] or epochs]),
        "seconds": seconds,
        "model": str(path),
        "history": epochs,
    }
    if args.json and choros.rank() == 0:
        write_json(args.json, figures)
    print_once(
        "held-out accuracy {accuracy:.4f}, {images_per_s:.0f} images/s, {seconds:.0f} s; model saved as {model}".format(
            **figures
        )
    )


def rows(history: keras.callbacks.History) -> list[dict[str, float]]:
    """Returns Keras' history as one row per epoch."""
    names, columns = history.history.keys(), history.history.values()
    return [
        {"epoch": epoch + 1, **dict(zip(names, map(float, values), strict=True))}
        for epoch, *values in zip(history.epoch, *columns, strict=True)
    ]


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
