"""CIFAR-10 from TFRecords: the eight changes that turn a script for one process into one for many.

They are marked ``Change 1`` to ``Change 8``; the rest is an ordinary training script. On one process, on two, and
on another framework::

    python examples/cifar10_horovod.py
    chorosrun -np 2 python examples/cifar10_horovod.py
    KERAS_BACKEND=torch chorosrun -np 2 python examples/cifar10_horovod.py --json figures.json

With CIFAR-10 itself, on two machines with four GPUs each::

    chorosrun -np 8 -H server1:4,server2:4 \\
        python examples/cifar10_horovod.py --data-dir ~/cifar10 --batch-size 128 --epochs 40

The data directory holds ``train/train.tfrecords``, ``validation/validation.tfrecords`` and
``eval/eval.tfrecords``; a record has ``image``, 3×32×32 bytes channels first, and ``label``, an
int64. Without ``--data-dir`` nothing is downloaded: the 1797 real handwritten digits of 8×8 pixels in
``digits.npz`` are enlarged to 32×32 and written, once, as such files into ``~/.cache/choros``
(``$XDG_CACHE_HOME/choros``).

TensorFlow reads the records, whichever framework trains: ``pip install tensorflow-cpu``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np

# Change 1: import Horovod's API.
import choros.keras as hvd

try:
    import tensorflow as tf
except ImportError as error:
    raise SystemExit("This example reads TFRecords with TensorFlow: pip install tensorflow-cpu") from error

HEIGHT, WIDTH, DEPTH = 32, 32, 3
NUM_CLASSES = 10
LEARNING_RATE = 0.01
MOMENTUM = 0.9
WEIGHT_DECAY = 2e-4
WARMUP_EPOCHS = 5
SHUFFLE_BUFFER = 10_000

Logs: TypeAlias = Mapping[str, float]


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()

    # Change 2: join the job; its size is the number of ranks.
    hvd.init()
    size = hvd.size()

    # Change 3: use one accelerator per process, or on CPUs an equal share of the cores.
    hvd.pin_device()
    if keras.backend.backend() != "tensorflow":
        tf.config.set_visible_devices([], "GPU")  # TensorFlow only reads here: it must not claim GPU memory
    keras.utils.set_random_seed(hvd.rank())  # every rank shuffles, crops and flips differently

    data_dir = args.data_dir or bundled_data()
    train, validation, evaluation = (records(data_dir, name, args.limit) for name in ("train", "validation", "eval"))
    num_train, num_eval = len(train), len(evaluation)

    # Change 4: scale the learning rate by the number of ranks, as the global batch is that many times larger.
    opt = keras.optimizers.SGD(LEARNING_RATE * size, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

    # Change 5: read this rank's shard. (Sharding precedes decoding, so no rank decodes records of another.)
    train, validation = hvd.shard(train), hvd.shard(validation)

    # Change 6: let the optimizer average the gradients of all ranks before it applies them.
    opt = hvd.DistributedOptimizer(opt)

    model = build_model()
    model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

    # Change 7: start from rank 0's state, report metrics of all ranks, and warm up to the scaled learning rate;
    # print and save on one rank only.
    verbose = 1 if hvd.rank() == 0 else 0
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=LEARNING_RATE * size, warmup_epochs=WARMUP_EPOCHS, verbose=verbose
        ),
        keras.callbacks.ReduceLROnPlateau(patience=10, verbose=verbose),
        hvd.callbacks.Throughput(),
    ]
    if hvd.rank() == 0:
        args.save_dir.mkdir(parents=True, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(args.save_dir / "checkpoint-{epoch}.keras"))
        callbacks.append(EpochTable())
        print(f"{num_train} training and {num_eval} held-out images from {data_dir}")
        print(f"{size} rank(s) on {keras.backend.backend()}, {args.batch_size} images per rank and step")

    # Change 8: divide the steps of an epoch among the ranks. (Validation ends with the last record.)
    history = model.fit(
        training_batches(train, args.batch_size),
        shuffle=False,  # the input pipeline has shuffled
        steps_per_epoch=max(1, num_train // args.batch_size // size),
        validation_data=held_out_batches(validation, args.batch_size),
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=0,
    )

    # All ranks have the same weights, so rank 0 evaluates on the whole set.
    if hvd.rank() == 0:
        loss, accuracy = model.evaluate(held_out_batches(evaluation, args.batch_size), verbose=0)
        model.save(args.save_dir / "model.keras")
        report(args, history, loss, accuracy, seconds=time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a convolutional network on CIFAR-10's TFRecords.")
    add = parser.add_argument
    add("--epochs", type=int, default=12, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="examples per step and rank (default: %(default)s)")
    add("--limit", type=int, help="use at most this many examples of each file")
    add("--data-dir", type=Path, help="holds train/train.tfrecords, and so on (default: bundled digits)")
    add("--save-dir", type=Path, default="runs/cifar10_horovod", help="for models (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    return parser.parse_args()


def build_model() -> keras.Model:
    """Returns three pairs of convolutions. (Batch normalization statistics would differ between the ranks.)"""
    layers: list[keras.Layer] = [keras.layers.Input((HEIGHT, WIDTH, DEPTH)), keras.layers.Rescaling(1 / 255)]
    for filters in (32, 64, 128):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(filters, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
        ]
    layers += [keras.layers.Flatten(), keras.layers.Dense(NUM_CLASSES, activation="softmax")]
    return keras.Sequential(layers)


def records(directory: Path, name: str, limit: int | None) -> tf.data.Dataset:
    """Returns the serialized records of one of the three files, as a dataset with known cardinality."""
    path = directory / name / f"{name}.tfrecords"
    if not path.exists():
        raise SystemExit(f"{path} is missing. Expected are NAME/NAME.tfrecords for train, validation and eval.")
    dataset = tf.data.TFRecordDataset(str(path)).take(limit or -1)
    number = dataset.reduce(np.int64(0), lambda count, _: count + 1)
    return dataset.apply(tf.data.experimental.assert_cardinality(number))


def training_batches(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Returns infinite batches: the number of steps ends an epoch, so that it is the same on all ranks."""
    return (
        dataset.shuffle(SHUFFLE_BUFFER)
        .repeat()
        .map(parse_record, num_parallel_calls=tf.data.AUTOTUNE)
        .map(lambda image, label: (augment(image), label), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch_size, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


def held_out_batches(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    return dataset.map(parse_record, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size)


def parse_record(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the image of a record, channels last, and its label as ten probabilities."""
    features = tf.io.parse_single_example(
        serialized,
        {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)},
    )
    image = tf.reshape(tf.io.decode_raw(features["image"], tf.uint8), [DEPTH, HEIGHT, WIDTH])
    image = tf.cast(tf.transpose(image, [1, 2, 0]), tf.float32)
    return image, tf.one_hot(features["label"], NUM_CLASSES)


def augment(image: tf.Tensor) -> tf.Tensor:
    """Shifts the image by up to four pixels in each direction, and flips half of the images at random."""
    image = tf.image.resize_with_crop_or_pad(image, HEIGHT + 8, WIDTH + 8)
    image = tf.image.random_crop(image, [HEIGHT, WIDTH, DEPTH])
    return tf.image.random_flip_left_right(image)


class EpochTable(keras.callbacks.Callback):
    """Prints a row per epoch, and every five seconds within an epoch the current step.

    It prints plain lines, as a rank's output passes through a launcher: it can look like a terminal and be a file.
    """

    COLUMNS: ClassVar = {
        "loss": ".4f",
        "accuracy": ".4f",
        "val_loss": ".4f",
        "val_accuracy": ".4f",
        "images_per_s": ".0f",
    }
    async_safe = True  # reads nothing that a later step changes, so JAX need not wait for the callback

    def on_train_begin(self, logs: Logs) -> None:  # noqa: ARG002  (Keras passes it by name)
        print("epoch".rjust(7), *(name.rjust(12) for name in self.COLUMNS), flush=True)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002
        self.epoch, self.last_line = epoch, time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if time.monotonic() - self.last_line > 5:
            self.last_line = time.monotonic()
            self.print_row(self.epoch, f"{logs['loss']:12.4f}", f"  step {batch + 1} of {self.params['steps']}")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self.print_row(epoch, *(format(logs[name], spec).rjust(12) for name, spec in self.COLUMNS.items()))

    def print_row(self, epoch: int, *cells: str) -> None:
        print(f"{epoch + 1}/{self.params['epochs']}".rjust(7), *cells, flush=True)


def bundled_data() -> Path:
    """Returns the directory of the digits as TFRecords; the first job on a machine writes them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choros"
    directory = cache / "digits-tfrecords"
    if hvd.local_rank() == 0 and not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            write_digits(Path(scratch, "digits"))
            try:
                os.replace(Path(scratch, "digits"), directory)  # atomic, even if the process is killed
            except OSError:
                if not directory.exists():  # else another job or machine has written it first
                    raise
    hvd.barrier()  # no rank reads before the files exist
    return directory


def write_digits(directory: Path) -> None:
    """Writes the digits: of every six, four for training, one for validation, one for evaluation, as in CIFAR-10."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    grey = np.kron(digits["images"] / 16 * 255, np.ones((1, 4, 4))).astype(np.uint8)
    images = np.repeat(grey[:, np.newaxis], DEPTH, axis=1)
    remainder = np.arange(len(images)) % 6
    for name, part in (("train", remainder > 1), ("validation", remainder == 1), ("eval", remainder == 0)):
        path = directory / name / f"{name}.tfrecords"
        path.parent.mkdir(parents=True)
        write_records(path, zip(images[part], digits["labels"][part], strict=True))


def write_records(path: Path, examples: Iterable[tuple[np.ndarray, int]]) -> None:
    """Writes images of 3×32×32 bytes and their labels as records in the format of ``parse_record``."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for image, label in examples:
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def report(
    args: argparse.Namespace, history: keras.callbacks.History, loss: float, accuracy: float, *, seconds: float
) -> None:
    epochs = rows(history)
    figures = {
        "example": "cifar10_horovod",
        "framework": keras.backend.backend(),
        "ranks": hvd.size(),
        "epochs": args.epochs,
        "loss": epochs[-1]["loss"],
        "held_out_loss": loss,
        "accuracy": accuracy,
        "images_per_s": typical_throughput(epochs),
        "seconds": seconds,
        "model": str(args.save_dir / "model.keras"),
        "history": epochs,
    }
    if args.json:
        write_json(args.json, figures)
    print(f"Test loss    : {loss:.4f}")
    print(f"Test accuracy: {accuracy:.4f}")
    print("{images_per_s:.0f} images/s, {seconds:.0f} s; model saved as {model}".format(**figures))


def rows(history: keras.callbacks.History) -> list[dict[str, float]]:
    """Returns Keras' history as one row per epoch."""
    names, columns = history.history.keys(), history.history.values()
    return [
        {"epoch": epoch + 1, **dict(zip(names, map(float, values), strict=True))}
        for epoch, *values in zip(history.epoch, *columns, strict=True)
    ]


def typical_throughput(epochs: Sequence[Mapping[str, float]]) -> float:
    """Returns the images per second of all epochs but the first, which also compiles."""
    return statistics.harmonic_mean([epoch["images_per_s"] for epoch in epochs[1:] or epochs])


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
