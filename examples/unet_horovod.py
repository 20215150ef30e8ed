"""A U-Net that segments the digit in a noisy image, in a run that can be killed and resumed.

On one process, on two, and on another framework::

    python examples/unet_horovod.py
    chorosrun -np 2 python examples/unet_horovod.py
    KERAS_BACKEND=jax chorosrun -np 2 python examples/unet_horovod.py --json figures.json

Rank 0 saves a checkpoint after each epoch. Start the same command again after a crash, and training resumes
from the latest one, with the same losses as an uninterrupted run. Or choose the epoch::

    chorosrun -np 2 python examples/unet_horovod.py --resume-from-epoch 3     # from checkpoint-3.keras
    chorosrun -np 2 python examples/unet_horovod.py --resume-from-epoch 0     # from new weights

The data directory holds two NumPy arrays of unsigned bytes, ``imgs_train.npy`` and ``imgs_mask_train.npy``,
each images × height × width; a mask is not 0 where the object is. Without ``--data-dir`` nothing is
downloaded: the 1797 real handwritten digits of 8×8 pixels in ``digits.npz`` are enlarged, put at random positions
on a noisy canvas and written, once, as such arrays into ``~/.cache/choros`` (``$XDG_CACHE_HOME/choros``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

import choros.keras as hvd
from choros import shard_range

LEARNING_RATE = 0.00013
IMAGES_FILE, MASKS_FILE = "imgs_train.npy", "imgs_mask_train.npy"

Floats: TypeAlias = npt.NDArray[np.float32]
Logs: TypeAlias = Mapping[str, float]


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    hvd.init()
    hvd.pin_device()
    keras.utils.set_random_seed(0)

    # Resuming: rank 0 finds the latest checkpoint, which may be on its local disk, and broadcasts the epoch.
    resume_from_epoch = 0
    if hvd.rank() == 0:
        resume_from_epoch = args.resume_from_epoch
        if resume_from_epoch is None:
            resume_from_epoch = latest_epoch(args.save_dir, below=args.epochs)
    resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))

    # Data: this rank's range of indices, whose last part is for validation.
    data_dir = args.data_dir or bundled_data()
    imgs_train, imgs_mask_train = open_arrays(data_dir, args.limit)
    start_index, end_index = shard_range(imgs_train.shape[0], hvd.rank(), hvd.size())
    images = imgs_train[start_index:end_index, ..., np.newaxis].astype(np.float32) / 255
    masks = (imgs_mask_train[start_index:end_index, ..., np.newaxis] > 0).astype(np.float32)
    num_train = len(images) - max(1, round(args.validation_split * len(images)))
    train = ShuffledBatches(images[:num_train], masks[:num_train], args.batch_size)

    # Model: rank 0 loads the checkpoint, with the optimizer state. The other ranks build a new model, which
    # receives rank 0's state from the broadcast callback before the first step.
    if resume_from_epoch > 0 and hvd.rank() == 0:
        model = hvd.load_model(
            checkpoint_path(args.save_dir, resume_from_epoch),
            custom_objects={"dice_coef": dice_coef, "dice_coef_loss": dice_coef_loss},
        )
    else:
        model = build_unet(images.shape[1:])
        model.compile(
            optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()),
            loss=dice_coef_loss,
            metrics=[dice_coef, keras.metrics.BinaryAccuracy(name="accuracy")],
        )
    model.optimizer.learning_rate = LEARNING_RATE * hvd.size()  # a run may resume with more or fewer ranks

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.Throughput(),
        keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: train.shuffle(epoch)),  # noqa: ARG005
    ]
    if hvd.rank() == 0:
        args.save_dir.mkdir(parents=True, exist_ok=True)
        callbacks += [Checkpoint(args.save_dir), EpochTable()]
        print(f"{len(imgs_train)} images of {images.shape[1]} x {images.shape[2]} pixels from {data_dir}")
        print(f"{hvd.size()} rank(s) on {keras.backend.backend()}, {args.batch_size} images per rank and step")
        if resume_from_epoch:
            print(f"resuming from {checkpoint_path(args.save_dir, resume_from_epoch)}")

    history = model.fit(
        train,
        shuffle=False,  # the order depends on the epoch: see ShuffledBatches
        validation_data=(images[num_train:], masks[num_train:]),
        validation_batch_size=args.batch_size,
        initial_epoch=resume_from_epoch,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=0,
    )

    if hvd.rank() == 0:
        # Saves without the optimizer. (Keras respects include_optimizer=False for .h5 files only.)
        keras.Model(model.inputs, model.outputs).save(args.save_dir / "unet.keras")
        report(args, history, seconds=time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a U-Net to segment images.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="total passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=12, help="examples per step and rank (default: %(default)s)")
    add("--validation-split", type=float, default=0.1, help="fraction held out (default: %(default)s)")
    add("--resume-from-epoch", type=int, metavar="N", help="load its checkpoint (default: the latest)")
    add("--limit", type=int, help="use at most this many images")
    add("--data-dir", type=Path, help=f"holds {IMAGES_FILE} and {MASKS_FILE} (default: bundled digits)")
    add("--save-dir", type=Path, default="runs/unet_horovod", help="for models (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    args = parser.parse_args()
    if args.resume_from_epoch is not None and not 0 <= args.resume_from_epoch < args.epochs:
        parser.error(f"--resume-from-epoch must be at least 0 and below --epochs, {args.epochs}")
    return args


def dice_coef(y_true: Any, y_pred: Any) -> Any:
    """Returns the overlap of two masks for each image: 1 if they are equal, near 0 if they are disjoint.

    It is per image, not per batch: only a mean over images is independent of the number of ranks.
    """
    axes = (1, 2, 3)
    overlap = ops.sum(y_true * y_pred, axis=axes)
    return (2 * overlap + 1) / (ops.sum(y_true, axis=axes) + ops.sum(y_pred, axis=axes) + 1)


def dice_coef_loss(y_true: Any, y_pred: Any) -> Any:
    return 1 - dice_coef(y_true, y_pred)


def build_unet(shape: tuple[int, int, int]) -> keras.Model:
    """Returns a U-Net with three levels: down to a quarter of the resolution and up again, with skip connections."""

    def convolve_twice(x: Any, filters: int) -> Any:
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)

    inputs = keras.Input(shape)
    fine = convolve_twice(inputs, 16)
    middle = convolve_twice(keras.layers.MaxPooling2D(2)(fine), 32)
    coarse = convolve_twice(keras.layers.MaxPooling2D(2)(middle), 64)
    x = keras.layers.Conv2DTranspose(32, 2, strides=2)(coarse)
    x = convolve_twice(keras.layers.concatenate([x, middle]), 32)
    x = keras.layers.Conv2DTranspose(16, 2, strides=2)(x)
    x = convolve_twice(keras.layers.concatenate([x, fine]), 16)
    return keras.Model(inputs, keras.layers.Conv2D(1, 1, activation="sigmoid")(x))


class ShuffledBatches(keras.utils.PyDataset):
    """Batches in an order that depends only on the epoch, so that a resumed run has the same order.

    A callback sets the epoch, as Keras also calls ``PyDataset.on_epoch_end`` after merely peeking at the first
    batch.
    """

    def __init__(self, images: Floats, masks: Floats, batch_size: int) -> None:
        super().__init__()
        self.images, self.masks, self.batch_size = images, masks, batch_size
        self.shuffle(epoch=0)

    def shuffle(self, epoch: int) -> None:
        self.order = np.random.default_rng(epoch).permutation(len(self.images))

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __getitem__(self, index: int) -> tuple[Floats, Floats]:
        batch = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return self.images[batch], self.masks[batch]


class Checkpoint(keras.callbacks.Callback):
    """Saves model and optimizer after each epoch: atomically, even if the run is killed."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002  (Keras passes it by name)
        partial = self.directory / "partial.keras"
        self.model.save(partial)
        os.replace(partial, checkpoint_path(self.directory, epoch + 1))


def checkpoint_path(directory: Path, epoch: int) -> Path:
    return directory / f"checkpoint-{epoch}.keras"


def latest_epoch(directory: Path, *, below: int) -> int:
    """Returns the latest epoch with a checkpoint, or 0. (A completed run thus repeats its last epoch.)"""
    saved = (int(path.stem.removeprefix("checkpoint-")) for path in directory.glob("checkpoint-*.keras"))
    return max((epoch for epoch in saved if epoch < below), default=0)


class EpochTable(keras.callbacks.Callback):
    """Prints a row per epoch, and every five seconds within an epoch the current step.

    It prints plain lines, as a rank's output passes through a launcher: it can look like a terminal and be a file.
    """

    COLUMNS: ClassVar = {
        "loss": ".4f",
        "dice_coef": ".4f",
        "val_loss": ".4f",
        "val_dice_coef": ".4f",
        "images_per_s": ".0f",
    }
    async_safe = True  # reads nothing that a later step changes, so JAX need not wait for the callback

    def on_train_begin(self, logs: Logs) -> None:  # noqa: ARG002
        print("epoch".rjust(7), *(name.rjust(13) for name in self.COLUMNS), flush=True)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002
        self.epoch, self.last_line = epoch, time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if time.monotonic() - self.last_line > 5:
            self.last_line = time.monotonic()
            self.print_row(self.epoch, f"{logs['loss']:13.4f}", f"  step {batch + 1} of {self.params['steps']}")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self.print_row(epoch, *(format(logs[name], spec).rjust(13) for name, spec in self.COLUMNS.items()))

    def print_row(self, epoch: int, *cells: str) -> None:
        print(f"{epoch + 1}/{self.params['epochs']}".rjust(7), *cells, flush=True)


def open_arrays(directory: Path, limit: int | None) -> list[npt.NDArray[np.uint8]]:
    """Maps images and masks into memory: only indexing reads them, and a rank needs only its range."""
    missing = [name for name in (IMAGES_FILE, MASKS_FILE) if not (directory / name).exists()]
    if missing:
        raise SystemExit(f"{directory} lacks {' and '.join(missing)}")
    arrays = [np.load(directory / name, mmap_mode="r")[:limit] for name in (IMAGES_FILE, MASKS_FILE)]
    shape = arrays[0].shape
    if arrays[1].shape != shape or len(shape) != 3 or shape[1] % 4 or shape[2] % 4:
        raise SystemExit(
            f"Images have shape {shape}, masks {arrays[1].shape}: expected is one shape for both, "
            "(images, height, width), with height and width multiples of 4"
        )
    return arrays


def bundled_data() -> Path:
    """Returns the directory of the digits as images and masks; the first job on a machine writes them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choros"
    directory = cache / "digits-masks"
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
    """Writes each digit, 24×24 pixels, at a random position on a 48×48 canvas, with noise of the same strength."""
    digits = np.kron(np.load(Path(__file__).with_name("digits.npz"))["images"] / 16, np.ones((1, 3, 3)))
    random = np.random.default_rng(0)
    canvas = np.zeros((len(digits), 48, 48))
    for picture, digit, (top, left) in zip(canvas, digits, random.integers(0, 25, (len(digits), 2)), strict=True):
        picture[top : top + 24, left : left + 24] = digit
    noisy = (canvas + random.random(canvas.shape)) / 2
    directory.mkdir()
    np.save(directory / IMAGES_FILE, (255 * noisy).astype(np.uint8))
    np.save(directory / MASKS_FILE, np.where(canvas > 0.25, 255, 0).astype(np.uint8))


def report(args: argparse.Namespace, history: keras.callbacks.History, seconds: float) -> None:
    epochs = rows(history)
    figures = {
        "example": "unet_horovod",
        "framework": keras.backend.backend(),
        "ranks": hvd.size(),
        "epochs": args.epochs,
        "loss": epochs[-1]["loss"],
        "held_out_loss": epochs[-1]["val_loss"],
        "accuracy": epochs[-1]["val_accuracy"],
        "dice_coef": epochs[-1]["val_dice_coef"],
        "images_per_s": typical_throughput(epochs),
        "seconds": seconds,
        "model": str(args.save_dir / "unet.keras"),
        "history": epochs,
    }
    if args.json:
        write_json(args.json, figures)
    print(
        "held-out dice {dice_coef:.4f}, {images_per_s:.0f} images/s, {seconds:.0f} s; model saved as {model}".format(
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
