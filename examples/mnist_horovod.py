"""MNIST with Horovod's programming model on Keras 3: every process of the job trains.

On one process, on two, and on another framework::

    python examples/mnist_horovod.py
    chorosrun -np 2 python examples/mnist_horovod.py
    KERAS_BACKEND=torch chorosrun -np 2 python examples/mnist_horovod.py --json figures.json

On two machines with four GPUs each, with MNIST's own four files::

    chorosrun -np 8 -H server1:4,server2:4 \\
        python examples/mnist_horovod.py --data-dir ~/mnist --batch-size 1024

Without ``--data-dir`` nothing is downloaded: the 1797 real handwritten digits of 8×8 pixels in ``digits.npz``
are enlarged to 28×28 and written, once, as MNIST files into ``~/.cache/choros`` (``$XDG_CACHE_HOME/choros``).

Six steps, numbered in ``main``, turn a script for one process into one for many.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

import choros.keras as hvd

Bytes: TypeAlias = npt.NDArray[np.uint8]
Examples: TypeAlias = tuple[npt.NDArray[np.float32], Bytes]
Logs: TypeAlias = Mapping[str, float]

TRAIN_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_FILES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_UNSIGNED_BYTE = 8


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()

    # 1. Join the job: from here on the process has a rank.
    hvd.init()

    # 2. Use one accelerator per process, or on CPUs an equal share of the cores.
    hvd.pin_device()

    # Every rank drops different units. (The initial weights are rank 0's on all ranks: see step 5.)
    keras.utils.set_random_seed(hvd.rank())

    # 3. Train on this rank's shard of each global batch.
    data_dir = args.data_dir or bundled_data()
    train = read_examples(data_dir, TRAIN_FILES, args.limit)
    test = read_examples(data_dir, TEST_FILES, args.limit)
    train_batches = hvd.shard(train, batch_size=args.batch_size * hvd.size(), shuffle=True)
    test_batches = hvd.shard(test, batch_size=args.batch_size * hvd.size())

    # 4. Let the optimizer average the gradients of all ranks before it applies them.
    model = build_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

    # 5. Start every rank from rank 0's weights, and report the metrics of the whole job.
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.Throughput(total_images=len(train[0])),
    ]

    # 6. Print and write files on one rank only.
    if hvd.rank() == 0:
        print(f"{len(train[0])} training and {len(test[0])} held-out images from {data_dir}")
        print(f"{hvd.size()} rank(s) on {keras.backend.backend()}, {args.batch_size} images per rank and step")
        callbacks.append(EpochTable())

    history = model.fit(
        train_batches,
        shuffle=False,  # hvd.shard has shuffled, in the same order on all ranks
        validation_data=test_batches,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=0,
    )

    if hvd.rank() == 0:
        args.save_dir.mkdir(parents=True, exist_ok=True)
        model.save(args.save_dir / "model.keras")
        report(args, history, seconds=time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small convolutional network on MNIST.")
    add = parser.add_argument
    add("--epochs", type=int, default=8, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="examples per step and rank (default: %(default)s)")
    add("--limit", type=int, help="use at most this many training and this many held-out examples")
    add("--data-dir", type=Path, help="MNIST's four IDX files, gzipped or not (default: bundled digits)")
    add("--save-dir", type=Path, default="runs/mnist_horovod", help="for the model (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    return parser.parse_args()


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


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


def read_examples(directory: Path, names: tuple[str, str], limit: int | None) -> Examples:
    """Returns the images, with values from 0 to 1, and the labels of two of MNIST's files."""
    images, labels = (read_idx(find_idx(directory, name))[:limit] for name in names)
    return images[..., np.newaxis].astype(np.float32) / 255, labels


def find_idx(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.exists():
            return path
    raise SystemExit(
        f"{directory} has neither {name} nor {name}.gz. "
        f"Expected are MNIST's four files: {', '.join(TRAIN_FILES + TEST_FILES)}, plain or with .gz"
    )


def read_idx(path: Path) -> Bytes:
    """Reads the array in an IDX file of bytes: two zeros, a type, the rank, the shape, the elements."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zeros, kind, rank = struct.unpack_from(">HBB", content)
    if zeros != 0 or kind != IDX_UNSIGNED_BYTE:
        raise SystemExit(f"{path} is not an IDX file of unsigned bytes: it starts with {content[:4].hex(' ')}")
    shape = struct.unpack_from(f">{rank}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def write_idx(path: Path, array: Bytes) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, IDX_UNSIGNED_BYTE, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def bundled_data() -> Path:
    """Returns the directory of the digits as MNIST files; the first job on a machine writes them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choros"
    directory = cache / "digits-idx"
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
    """Writes the digits as MNIST files. Every sixth one is held out, as in MNIST every seventh."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    enlarged = np.kron(digits["images"] / 16 * 255, np.ones((1, 3, 3)))
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    labels = digits["labels"].astype(np.uint8)
    held_out = np.arange(len(labels)) % 6 == 0
    directory.mkdir()
    for (image_file, label_file), part in ((TRAIN_FILES, ~held_out), (TEST_FILES, held_out)):
        write_idx(directory / image_file, images[part])
        write_idx(directory / label_file, labels[part])


def report(args: argparse.Namespace, history: keras.callbacks.History, seconds: float) -> None:
    epochs = rows(history)
    figures = {
        "example": "mnist_horovod",
        "framework": keras.backend.backend(),
        "ranks": hvd.size(),
        "epochs": args.epochs,
        "loss": epochs[-1]["loss"],
        "held_out_loss": epochs[-1]["val_loss"],
        "accuracy": epochs[-1]["val_accuracy"],
        "images_per_s": typical_throughput(epochs),
        "seconds": seconds,
        "model": str(args.save_dir / "model.keras"),
        "history": epochs,
    }
    if args.json:
        write_json(args.json, figures)
    print(
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
