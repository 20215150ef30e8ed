"""Handwritten digits in a plain PyTorch loop with Horovod's programming model: every process of the job trains.

On one process, and on two::

    python examples/mnist_torch.py
    chorosrun -np 2 python examples/mnist_torch.py --json figures.json

Nothing is downloaded: the data are the 1797 real handwritten digits of 8×8 pixels in ``digits.npz``.

Five steps, numbered in ``main``, turn a loop for one process into one for many.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import choros.torch as hvd

COLUMNS = {"loss": ".4f", "held_out_loss": ".4f", "accuracy": ".4f", "images_per_s": ".0f"}


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()

    # 1. Join the job: from here on the process has a rank, and the accelerator of its local rank.
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # 2. Train on this rank's shard of the examples.
    train, test = read_digits(args.limit)
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=1)
    batches = DataLoader(train, args.batch_size, sampler=sampler)

    # 3. Let the optimizer average the gradients of all ranks before it applies them.
    model = build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # 4. Start every rank from rank 0's weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # 5. Print and write files on one rank only.
    if hvd.rank() == 0:
        print(f"{len(train)} training and {len(test)} held-out images")
        print(f"{hvd.size()} rank(s) on {device.type}, {args.batch_size} images per rank and step")
        print("epoch".rjust(7), *(name.rjust(14) for name in COLUMNS), flush=True)

    history = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        begin = time.monotonic()
        loss = train_epoch(model, optimizer, batches, device)
        row = {"epoch": epoch + 1, "loss": loss, "images_per_s": len(train) / (time.monotonic() - begin)}
        history.append(row | evaluate(model, test, device))
        if hvd.rank() == 0:
            cells = (format(history[-1][name], spec).rjust(14) for name, spec in COLUMNS.items())
            print(f"{epoch + 1}/{args.epochs}".rjust(7), *cells, flush=True)

    if hvd.rank() == 0:
        args.save_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.save_dir / "model.pt")
        report(args, history, seconds=time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small convolutional network on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=8, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="examples per step and rank (default: %(default)s)")
    add("--limit", type=int, help="use at most this many training and this many held-out examples")
    add("--save-dir", type=Path, default="runs/mnist_torch", help="for the model (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    return parser.parse_args()


def build_model() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def read_digits(limit: int | None) -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the held-out examples; every sixth digit is held out."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images = torch.tensor(digits["images"][:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits["labels"])
    held_out = np.arange(len(labels)) % 6 == 0
    train, test = (TensorDataset(images[part][:limit], labels[part][:limit]) for part in (~held_out, held_out))
    return train, test


def train_epoch(model: Any, optimizer: Any, batches: Any, device: torch.device) -> float:
    """Trains for an epoch; returns the mean loss over all ranks."""
    model.train()
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return hvd.allreduce(torch.stack(losses).mean(), name="loss").item()


def evaluate(model: Any, test: TensorDataset, device: torch.device) -> dict[str, float]:
    """Returns the loss and accuracy on the held-out examples, of which each rank evaluates its shard."""
    model.eval()
    start, stop = hvd.shard_range(len(test), hvd.rank(), hvd.size())
    images, labels = (tensor.to(device) for tensor in test[start:stop])
    with torch.no_grad():
        scores = model(images)
    sums = torch.stack([cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) == labels).sum()])
    loss, right = hvd.allreduce(sums, name="held out", op=hvd.Sum).tolist()
    return {"held_out_loss": loss / len(test), "accuracy": right / len(test)}


def report(args: argparse.Namespace, history: Sequence[Mapping[str, float]], seconds: float) -> None:
    last = history[-1]
    figures = {
        "example": "mnist_torch",
        "framework": "torch",
        "ranks": hvd.size(),
        "epochs": args.epochs,
        "loss": last["loss"],
        "held_out_loss": last["held_out_loss"],
        "accuracy": last["accuracy"],
        "images_per_s": statistics.harmonic_mean([row["images_per_s"] for row in history[1:] or history]),
        "seconds": seconds,
        "model": str(args.save_dir / "model.pt"),
        "history": history,
    }
    if args.json:
        write_json(args.json, figures)
    print(
        "held-out accuracy {accuracy:.4f}, {images_per_s:.0f} images/s, {seconds:.0f} s; model saved as {model}".format(
            **figures
        )
    )


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
