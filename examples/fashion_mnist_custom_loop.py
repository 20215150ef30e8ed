"""Fashion MNIST in a custom training loop under MirroredStrategy, on TensorFlow, PyTorch and JAX.

On one process, on two, and on another framework::

    python examples/fashion_mnist_custom_loop.py
    chorosrun -np 2 python examples/fashion_mnist_custom_loop.py
    KERAS_BACKEND=torch chorosrun -np 2 python examples/fashion_mnist_custom_loop.py --json figures.json

On four GPUs, with Fashion MNIST itself (which Keras downloads)::

    chorosrun -np 4 python examples/fashion_mnist_custom_loop.py --dataset fashion_mnist

Without ``--dataset`` nothing is downloaded: the 1797 real handwritten digits of 8×8 pixels in
``digits.npz`` are enlarged to 28×28.

The loop is the same on all frameworks; the steps are written for each framework, in ``tensorflow_steps``,
``torch_steps`` and ``jax_steps``. In a step each replica divides the sum of its examples' losses by the global batch
size, and ``apply`` sums the gradients of all replicas: the result is the gradient of the mean loss.

A checkpoint is written every second epoch: with ``tf.train.Checkpoint`` on TensorFlow, of the weights alone otherwise.
At the end the last one is restored without a strategy, and its accuracy is compared with that of its epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

import choros
from choros import distribute, nn
from choros.keras import barrier

Examples: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]

FRAMEWORK = keras.backend.backend()
COLUMNS = {"loss": ".4f", "accuracy": ".4f", "test_loss": ".4f", "test_accuracy": ".4f", "images_per_s": ".0f"}


@dataclass(frozen=True)
class Task:
    """The model, optimizer, losses and metrics of a step.

    Attributes:
        per_example_loss: returns the loss of each example from labels and predictions.
        average_loss: returns the sum of these losses on this replica, divided by the global batch size.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    per_example_loss: Callable[[Any, Any], Any]
    average_loss: Callable[[Any, Any], Any]
    train_accuracy: keras.metrics.Metric
    test_loss: keras.metrics.Metric
    test_accuracy: keras.metrics.Metric


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    strategy = distribute.MirroredStrategy()
    batch_size = args.batch_size * strategy.num_replicas_in_sync
    train, test = read_examples(args.dataset, args.limit)
    print_once(f"{len(train[0])} training and {len(test[0])} held-out images of {args.dataset}")
    print_once(
        f"{strategy.num_replicas_in_sync} replica(s) on {FRAMEWORK}, {args.batch_size} images per replica and step"
    )

    train_dataset = strategy.experimental_distribute_dataset(batches(train, batch_size, shuffle=True))
    test_dataset = strategy.experimental_distribute_dataset(batches(test, batch_size))

    # Objects with variables are created in the scope: model, optimizer, metrics, and the checkpoint.
    with strategy.scope():
        per_example_loss = keras.losses.SparseCategoricalCrossentropy(reduction="none")

        def average_loss(labels: Any, predictions: Any) -> Any:
            return nn.compute_average_loss(per_example_loss(labels, predictions), global_batch_size=batch_size)

        task = Task(
            build_model(),
            keras.optimizers.Adam(),
            per_example_loss,
            average_loss,
            keras.metrics.SparseCategoricalAccuracy(name="train_accuracy"),
            keras.metrics.Mean(name="test_loss"),
            keras.metrics.SparseCategoricalAccuracy(name="test_accuracy"),
        )
        task.optimizer.build(task.model.trainable_variables)
        save = checkpoints(args.save_dir, task.model, task.optimizer)

    train_step, test_step, compiled = STEPS[FRAMEWORK](task)

    @compiled
    def distributed_train_step(batch: Any) -> Any:
        losses = strategy.run(train_step, args=(batch,))
        return strategy.reduce("SUM", losses, axis=None)

    @compiled
    def distributed_test_step(batch: Any) -> None:
        strategy.run(test_step, args=(batch,))

    print_once("  epoch", *(name.rjust(14) for name in COLUMNS))
    history = []
    for epoch in range(args.epochs):
        begin = time.monotonic()
        losses = [float(distributed_train_step(batch)) for batch in train_dataset]
        seconds = time.monotonic() - begin
        for batch in test_dataset:
            distributed_test_step(batch)
        if epoch % 2 == 0:
            save(epoch + 1)
        # Metrics created in the scope reduce over all replicas, so all processes call result().
        row = {
            "epoch": epoch + 1,
            "loss": statistics.fmean(losses),
            "accuracy": float(task.train_accuracy.result()),
            "test_loss": float(task.test_loss.result()),
            "test_accuracy": float(task.test_accuracy.result()),
            "images_per_s": len(train[0]) / seconds,
        }
        history.append(row)
        print_once(
            f"{epoch + 1}/{args.epochs}".rjust(7),
            *(format(row[name], spec).rjust(14) for name, spec in COLUMNS.items()),
        )
        for metric in (task.train_accuracy, task.test_loss, task.test_accuracy):
            metric.reset_state()

    if choros.rank() == 0:
        saved = next(row for row in reversed(history) if row["epoch"] % 2)
        restored = evaluate_without_strategy(args.save_dir, test)
        print_once(f"accuracy after restoring epoch {saved['epoch']} without a strategy: {restored:.4f}")
        np.testing.assert_allclose(restored, saved["test_accuracy"], atol=1e-6)
        report(args, strategy, history, restored, seconds=time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small convolutional network in a custom training loop.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="examples per step and replica (default: %(default)s)")
    add("--dataset", choices=["digits", "mnist", "fashion_mnist"], default="digits", help="(default: %(default)s)")
    add("--limit", type=int, help="use at most this many training and this many held-out examples")
    add("--save-dir", type=Path, default="runs/fashion_mnist_custom_loop", help="(default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the final figures to FILE")
    return parser.parse_args()


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


# Each function returns a training step and a test step of a replica, and a decorator that compiles their callers.


def tensorflow_steps(task: Task) -> tuple[Any, Any, Any]:
    import tensorflow as tf

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = task.model(images, training=True)
            loss = task.average_loss(labels, predictions)
        gradients = tape.gradient(loss, task.model.trainable_variables)
        task.optimizer.apply_gradients(zip(gradients, task.model.trainable_variables, strict=True))
        task.train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        predictions = task.model(images, training=False)
        task.test_loss.update_state(task.per_example_loss(labels, predictions))
        task.test_accuracy.update_state(labels, predictions)

    return train_step, test_step, tf.function(reduce_retracing=True)


def torch_steps(task: Task) -> tuple[Any, Any, Any]:
    import torch

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        task.model.zero_grad()
        predictions = task.model(images, training=True)
        loss = task.average_loss(labels, predictions)
        loss.backward()
        with torch.no_grad():
            variables = task.model.trainable_variables
            task.optimizer.apply([variable.value.grad for variable in variables], variables)
            task.train_accuracy.update_state(labels, predictions)
        return loss.detach()

    @torch.no_grad()
    def test_step(inputs: Any) -> None:
        images, labels = inputs
        predictions = task.model(images, training=False)
        task.test_loss.update_state(task.per_example_loss(labels, predictions))
        task.test_accuracy.update_state(labels, predictions)

    return train_step, test_step, lambda function: function


def jax_steps(task: Task) -> tuple[Any, Any, Any]:
    import jax

    model, optimizer = task.model, task.optimizer
    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)

    def loss_of(trainable: Any, others: Any, images: Any, labels: Any) -> Any:
        predictions, others = model.stateless_call(trainable, others, images, training=True)
        return task.average_loss(labels, predictions), (predictions, others)

    @jax.jit
    def update(trainable: Any, others: Any, moments: Any, images: Any, labels: Any) -> Any:
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (predictions, others)), gradients = gradient_of(trainable, others, images, labels)
        trainable, moments = optimizer.stateless_apply(moments, gradients, trainable)
        return loss, predictions, (trainable, others, moments)

    @jax.jit
    def predict(trainable: Any, others: Any, images: Any) -> Any:
        return model.stateless_call(trainable, others, images, training=False)[0]

    def values() -> list[list[Any]]:
        return [[variable.value for variable in group] for group in groups]

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        loss, predictions, updated = update(*values(), images, labels)
        for group, new in zip(groups, updated, strict=True):
            for variable, value in zip(group, new, strict=True):
                variable.assign(value)
        task.train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        predictions = predict(*values()[:2], images)
        task.test_loss.update_state(task.per_example_loss(labels, predictions))
        task.test_accuracy.update_state(labels, predictions)

    return train_step, test_step, lambda function: function


STEPS = {"tensorflow": tensorflow_steps, "torch": torch_steps, "jax": jax_steps}


# Data.


def batches(examples: Examples, batch_size: int, *, shuffle: bool = False) -> Any:
    """Returns global batches; the order is the same on all processes and differs in each epoch."""
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(examples)
        return (dataset.shuffle(len(examples[0]), seed=0) if shuffle else dataset).batch(batch_size)
    if FRAMEWORK == "torch":
        import torch

        dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, examples))
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.DataLoader(dataset, batch_size, shuffle=shuffle, generator=generator)
    return Batches(examples, batch_size, np.random.default_rng(0) if shuffle else None)


@dataclass(frozen=True)
class Batches:
    examples: Examples
    batch_size: int
    generator: np.random.Generator | None

    def __iter__(self) -> Iterator[Examples]:
        images, labels = self.examples
        order = np.arange(len(images))
        if self.generator is not None:
            # Full batches only, so that a step is compiled once; the examples left over differ in each epoch.
            order = self.generator.permutation(len(images))[: len(images) // self.batch_size * self.batch_size]
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            yield images[rows], labels[rows]


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


# Checkpoints.


def checkpoints(directory: Path, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Callable[[int], Any]:
    """Returns a function that saves a checkpoint after an epoch. All processes call it; the first one writes."""
    directory.mkdir(parents=True, exist_ok=True)
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)
        return lambda epoch: checkpoint.save(str(directory / "ckpt"))  # noqa: ARG005
    return lambda epoch: model.save_weights(directory / "ckpt.weights.h5")  # noqa: ARG005


def evaluate_without_strategy(directory: Path, test: Examples) -> float:
    """Returns the accuracy of the latest checkpoint, restored into a new model."""
    model, optimizer = build_model(), keras.optimizers.Adam()
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)
        checkpoint.restore(tf.train.latest_checkpoint(directory)).assert_existing_objects_matched()
    else:
        model.load_weights(directory / "ckpt.weights.h5")
    images, labels = test
    eval_accuracy = keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
    eval_accuracy.update_state(labels, model.predict(images, verbose=0))
    return float(eval_accuracy.result())


# Figures.


def print_once(*texts: str) -> None:
    if choros.rank() == 0:
        print(*texts, flush=True)


def report(
    args: argparse.Namespace,
    strategy: distribute.Strategy,
    history: Sequence[Mapping[str, float]],
    restored: float,
    seconds: float,
) -> None:
    last = history[-1]
    figures = {
        "example": "fashion_mnist_custom_loop",
        "framework": FRAMEWORK,
        "ranks": choros.size(),
        "replicas": strategy.num_replicas_in_sync,
        "epochs": args.epochs,
        "loss": last["loss"],
        "held_out_loss": last["test_loss"],
        "accuracy": last["test_accuracy"],
        "restored_accuracy": restored,
        "images_per_s": statistics.harmonic_mean([row["images_per_s"] for row in history[1:] or history]),
        "seconds": seconds,
        "model": str(args.save_dir),
        "history": history,
    }
    if args.json:
        write_json(args.json, figures)
    print("held-out accuracy {accuracy:.4f}, {images_per_s:.0f} images/s, {seconds:.0f} s".format(**figures))


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
