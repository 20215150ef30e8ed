"""Handwritten digits, trained asynchronously under ParameterServerStrategy: with ``fit`` or a ClusterCoordinator.

A chief, two parameter servers and two workers on this machine, on any framework::

    chorosrun --ps 2 -np 2 python examples/parameter_server.py
    chorosrun --ps 2 -np 2 python examples/parameter_server.py --coordinator
    KERAS_BACKEND=torch chorosrun --ps 2 -np 2 python examples/parameter_server.py --json figures.json

On three hosts; the chief and the servers share the first::

    chorosrun --ps 2 -np 8 -H server1:3,server2:4,server3:4 python examples/parameter_server.py --max-staleness 4

All processes run this script. The servers store the variables and the optimizer state; they serve, and exit, inside
``ParameterServerStrategy()``. Workers run up to the first ``fit`` or ``schedule``, where they serve the chief: they
fetch the variables from the servers, compute the gradients of a batch and send them there, without waiting for other
workers. Only the chief runs the whole script. So models are built before ``fit``, and results are printed and saved
after it.

A worker that is killed (``kill -9``) is restarted; another worker repeats its batch in the meantime.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

from choros import distribute

Examples: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]
Row: TypeAlias = dict[str, float]

FRAMEWORK = keras.backend.backend()
COLUMNS = {"loss": ".4f", "accuracy": ".4f", "val_loss": ".4f", "val_accuracy": ".4f", "images_per_s": ".0f"}


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    # A kernel of 16 KiB or more is sharded, so that both servers store a part of it.
    partitioner = distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=8 << 10, max_shards=2)
    strategy = distribute.ParameterServerStrategy(variable_partitioner=partitioner, max_staleness=args.max_staleness)

    # From here on, the chief and the workers.
    train, test = read_digits(args.limit)
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)

    history = coordinate(strategy, model, train, test, args) if args.coordinator else fit(model, train, test, args)

    # From here on, only the chief.
    args.save_dir.mkdir(parents=True, exist_ok=True)
    model.save(args.save_dir / "model.keras")
    report(args, strategy, history, seconds=time.monotonic() - started)


def fit(model: keras.Model, train: Examples, test: Examples, args: argparse.Namespace) -> list[Row]:
    """Trains with Keras' ``fit``: the chief distributes the batches."""
    rows = Rows(len(train[0]), args.epochs)
    model.fit(
        *train,
        batch_size=args.batch_size,
        validation_data=test,
        epochs=args.epochs,
        callbacks=[rows],
        verbose=0,
    )
    return rows.history


def coordinate(
    strategy: distribute.ParameterServerStrategy,
    model: keras.Model,
    train: Examples,
    test: Examples,
    args: argparse.Namespace,
) -> list[Row]:
    """Trains in a custom loop: the chief schedules steps, each worker takes batches from its own data set."""
    coordinator = distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    train_step = STEPS[FRAMEWORK](model, accuracy)

    def step(iterator: Iterator[Examples]) -> Any:
        return strategy.run(train_step, args=next(iterator))

    dataset = coordinator.create_per_worker_dataset(partial(shuffled_batches, train, args.batch_size))
    iterator = iter(dataset)
    rows = Rows(len(train[0]), args.epochs)
    for epoch in range(args.epochs):
        rows.on_epoch_begin(epoch)
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(-(-len(train[0]) // args.batch_size))]
        coordinator.join()  # Now the chief's model has the servers' variables, and its metrics the workers' sums.
        logs = {"loss": statistics.fmean(map(float, coordinator.fetch(losses))), "accuracy": float(accuracy.result())}
        accuracy.reset_state()
        rows.on_test_begin()
        held_out = model.evaluate(*test, verbose=0, return_dict=True)
        rows.on_epoch_end(epoch, logs | {f"val_{name}": value for name, value in held_out.items()})
    return rows.history


def shuffled_batches(examples: Examples, batch_size: int) -> Iterator[Examples]:
    """Yields batches without end, in a different order on each worker."""
    images, labels = examples
    generator = np.random.default_rng()
    while True:
        rows = generator.choice(len(images), min(batch_size, len(images)), replace=False)
        yield images[rows], labels[rows]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network with parameter servers.")
    add = parser.add_argument
    add("--coordinator", action="store_true", help="schedule steps with a ClusterCoordinator instead of fit")
    add("--max-staleness", type=int, help="the most steps that a worker may be ahead (default: no bound)")
    add("--epochs", type=int, default=8, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="examples per step of a worker (default: %(default)s)")
    add("--limit", type=int, help="use at most this many training and this many held-out examples")
    add("--save-dir", type=Path, default="runs/parameter_server", help="for the model (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    return parser.parse_args()


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def read_digits(limit: int | None) -> tuple[Examples, Examples]:
    """Returns the training and the held-out examples; every sixth digit is held out."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = (digits["images"] / 16).reshape(-1, 64).astype(np.float32), digits["labels"].astype(np.int32)
    held_out = np.arange(len(labels)) % 6 == 0
    return (images[~held_out][:limit], labels[~held_out][:limit]), (images[held_out][:limit], labels[held_out][:limit])


# A worker's step, for each framework.


def mean_loss(labels, predictions):  # without annotations, which TensorFlow would try to resolve on the worker
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, predictions))


def tensorflow_step(model: keras.Model, accuracy: keras.metrics.Metric) -> Callable[..., Any]:
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = mean_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    return train_step


def torch_step(model: keras.Model, accuracy: keras.metrics.Metric) -> Callable[..., Any]:
    import torch

    def train_step(images: Any, labels: Any) -> Any:
        model.zero_grad()
        predictions = model(images, training=True)
        loss = mean_loss(labels, predictions)
        loss.backward()
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
            accuracy.update_state(labels, predictions)
        return loss.detach()

    return train_step


def jax_step(model: keras.Model, accuracy: keras.metrics.Metric) -> Callable[..., Any]:
    import jax

    def loss_on(trainable: Any, others: Any, images: Any, labels: Any) -> Any:
        predictions, others = model.stateless_call(trainable, others, images, training=True)
        return mean_loss(labels, predictions), predictions

    gradient_of = jax.jit(jax.value_and_grad(loss_on, has_aux=True))

    def train_step(images: Any, labels: Any) -> Any:
        trainable, others = ([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables))
        (loss, predictions), gradients = gradient_of(trainable, others, images, labels)
        model.optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(labels, predictions)
        return loss

    return train_step


STEPS = {"tensorflow": tensorflow_step, "torch": torch_step, "jax": jax_step}


class Rows(keras.callbacks.Callback):
    """Records and prints a row per epoch."""

    def __init__(self, images: int, epochs: int) -> None:
        super().__init__()
        self.images, self.epochs = images, epochs
        self.history: list[Row] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002  (Keras passes them by name)
        self.begin = time.monotonic()

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self.images_per_s = self.images / (time.monotonic() - self.begin)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        row = {"epoch": epoch + 1, **logs, "images_per_s": self.images_per_s}
        self.history.append(row)
        if epoch == 0:
            print("  epoch", *(name.rjust(12) for name in COLUMNS))
        cells = (format(row[name], spec).rjust(12) for name, spec in COLUMNS.items())
        print(f"{epoch + 1}/{self.epochs}".rjust(7), *cells, flush=True)


def report(
    args: argparse.Namespace, strategy: distribute.ParameterServerStrategy, history: Sequence[Row], seconds: float
) -> None:
    last = history[-1]
    cluster = strategy.cluster_resolver.cluster_spec().as_dict()
    figures = {
        "example": "parameter_server",
        "framework": FRAMEWORK,
        "ranks": len(cluster["worker"]),
        "servers": len(cluster["ps"]),
        "epochs": args.epochs,
        "loss": last["loss"],
        "held_out_loss": last["val_loss"],
        "accuracy": last["val_accuracy"],
        "images_per_s": statistics.harmonic_mean([row["images_per_s"] for row in history[1:] or history]),
        "seconds": seconds,
        "model": str(args.save_dir / "model.keras"),
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
