"""Handwritten digits on several machines under MultiWorkerMirroredStrategy, in a run that can be stopped and resumed.

On one machine, to try it out::

    python examples/multi_worker.py
    chorosrun -np 2 python examples/multi_worker.py

Every process runs this script. On two machines with four GPUs each, chorosrun starts the processes from one of them,
and reaches the other with ssh::

    chorosrun -np 8 -H server1:4,server2:4 python examples/multi_worker.py

Or SLURM starts them: with its resolver, which does not need MPI, or with MPI, if SLURM has PMIx::

    srun --nodes 2 --ntasks-per-node 4 python examples/multi_worker.py --slurm
    srun --nodes 2 --ntasks-per-node 4 --mpi=pmix python examples/multi_worker.py

Or start them by hand, one for each address of ``TF_CONFIG``, with the index of that address::

    TF_CONFIG='{"cluster": {"worker": ["server1:29500", "server2:29500"]}, "task": {"type": "worker", "index": 0}}' \\
        python examples/multi_worker.py

``multi_worker.md`` describes each way. Without chorosrun and MPI, PyTorch's collectives reduce the gradients:
``pip install torch``, whatever the framework.

The first worker backs up the training after each epoch, and saves the model. The same command, started again,
continues after the last completed epoch, on any number of workers::

    chorosrun -np 2 python examples/multi_worker.py --epochs 2
    chorosrun -np 2 python examples/multi_worker.py --epochs 4          # epochs 3 and 4
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

import choros
from choros import distribute
from choros.keras.callbacks import Throughput

Examples: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    resolver = distribute.cluster_resolver.SlurmClusterResolver() if args.slurm else None
    strategy = distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    print(f"worker {choros.rank()} of {choros.size()} is on {socket.gethostname()}", flush=True)

    train, test = read_digits(args.limit)
    batch_size = args.batch_size * strategy.num_replicas_in_sync
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])

    # All workers have the same callbacks; only the first worker writes files.
    callbacks = [
        keras.callbacks.BackupAndRestore(args.save_dir / "backup", delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(args.save_dir / "model.keras"),
        Throughput(total_images=len(train[0])),
    ]
    history = model.fit(
        *train,
        batch_size=batch_size,
        validation_data=test,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=2,
    )
    loss, accuracy = model.evaluate(*test, batch_size=batch_size, verbose=0)

    if choros.rank() == 0:
        report(args, history, (loss, accuracy), seconds=time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network on several machines; resumes from its backup.")
    add = parser.add_argument
    add(
        "--epochs",
        type=int,
        default=8,
        help="total passes over the data, including those of earlier runs (default: %(default)s)",
    )
    add("--batch-size", type=int, default=32, help="examples per step and worker (default: %(default)s)")
    add("--limit", type=int, help="use at most this many training and this many held-out examples")
    add("--slurm", action="store_true", help="get the workers' addresses from SLURM instead of TF_CONFIG or MPI")
    add(
        "--save-dir", type=Path, default="runs/multi_worker", help="for the backup and the model (default: %(default)s)"
    )
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    return parser.parse_args()


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def read_digits(limit: int | None) -> tuple[Examples, Examples]:
    """Returns the training and the held-out examples; every sixth digit is held out."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images = (digits["images"][..., np.newaxis] / 16).astype(np.float32)
    labels = digits["labels"].astype(np.int32)
    held_out = np.arange(len(labels)) % 6 == 0
    return (images[~held_out][:limit], labels[~held_out][:limit]), (images[held_out][:limit], labels[held_out][:limit])


def report(
    args: argparse.Namespace, history: keras.callbacks.History, evaluation: tuple[float, float], seconds: float
) -> None:
    if not history.epoch:
        print(f"--epochs {args.epochs}: these epochs are trained already; use a larger number to continue")
        return
    epochs = rows(history)
    figures = {
        "example": "multi_worker",
        "framework": keras.backend.backend(),
        "ranks": choros.size(),
        "epochs": args.epochs,
        "loss": epochs[-1]["loss"],
        "held_out_loss": evaluation[0],
        "accuracy": evaluation[1],
        "images_per_s": statistics.harmonic_mean([epoch["images_per_s"] for epoch in epochs[1:] or epochs]),
        "seconds": seconds,
        "model": str(args.save_dir / "model.keras"),
        "history": epochs,
    }
    if args.json:
        write_json(args.json, figures)
    print(f"trained epochs {epochs[0]['epoch']} to {epochs[-1]['epoch']} on {choros.size()} worker(s)")
    print(
        "held-out accuracy {accuracy:.4f}, {images_per_s:.0f} images/s, {seconds:.0f} s; model saved as {model}".format(
            **figures
        )
    )


def rows(history: keras.callbacks.History) -> list[dict[str, Any]]:
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
