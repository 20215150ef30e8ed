"""A custom training loop against ``fit``: images per second of ``examples/fashion_mnist_custom_loop.py``.

    KERAS_BACKEND=tensorflow chorosrun -np 2 python benchmarks/custom_loop/main.py

All processes train the example's model on the same batches under one strategy, in turns by ``fit`` and by the
example's loop. Prints the images per second of the best and the median round of both, the CPU time of process 0 for
each step, and their ratios: above 1, the loop is faster.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import keras
import numpy as np

import choros
import fashion_mnist_custom_loop as example
from choros import distribute, nn
from choros.keras import barrier

#: The seconds and the CPU seconds of a step.
Cost = tuple[float, float]


def now() -> Cost:
    """The time, and the CPU time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime


def per_step(marks: list[Cost]) -> Cost:
    """Returns the cost of a step from the ends of steps."""
    steps = len(marks) - 1
    return (marks[-1][0] - marks[0][0]) / steps, (marks[-1][1] - marks[0][1]) / steps


class Marks(keras.callbacks.Callback):
    """The ends of the steps of ``fit``."""

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self.ends: list[Cost] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.ends.append(now())


def contenders(strategy: distribute.Strategy, dataset: Any, batch_size: int) -> dict[str, Any]:
    """Returns functions that train one epoch and return the cost of a step."""
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="none")

        def average_loss(labels: Any, predictions: Any) -> Any:
            return nn.compute_average_loss(loss(labels, predictions), global_batch_size=batch_size)

        names = ("train_accuracy", "test_loss", "test_accuracy")
        metrics = [keras.metrics.SparseCategoricalAccuracy(name=name) for name in names]
        task = example.Task(example.build_model(), keras.optimizers.Adam(), loss, average_loss, *metrics)
        task.optimizer.build(task.model.trainable_variables)
        model = example.build_model()
        model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    train_step, _, compiled = example.STEPS[example.FRAMEWORK](task)

    @compiled
    def distributed_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(train_step, args=(batch,)), axis=None)

    own = strategy.experimental_distribute_dataset(dataset)

    def loop() -> Iterator[Cost]:
        for batch in own:
            float(distributed_step(batch))
            yield now()

    def fit() -> Cost:
        marks = Marks()
        model.fit(dataset, verbose=0, callbacks=[marks])
        return per_step(marks.ends)

    return {"fit": fit, "custom loop": lambda: per_step(list(loop()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64, help="images of each process in a step")
    parser.add_argument("--steps", type=int, default=30, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    strategy = distribute.MirroredStrategy()
    batch_size = given.batch_size * strategy.num_replicas_in_sync
    count = batch_size * (given.steps + 1)
    draws = np.random.default_rng(0)
    images = draws.random((count, 28, 28, 1)).astype("float32"), draws.integers(0, 10, count).astype("int32")
    train = contenders(strategy, example.batches(images, batch_size), batch_size)
    rounds: dict[str, list[Cost]] = {name: [] for name in train}
    for number in range(given.rounds + 1):
        for name in list(train)[:: 1 if number % 2 else -1]:
            barrier()
            cost = train[name]()
            if number:  # the first round compiles
                rounds[name].append(cost)
    if choros.rank() == 0:
        report(rounds, batch_size)


def report(rounds: dict[str, list[Cost]], batch_size: int) -> None:
    print(f"{example.FRAMEWORK:14}{'images/s, best':>16}{'median':>10}{'CPU ms / step':>16}")
    figures = []
    for name, costs in rounds.items():
        speeds = [batch_size / seconds for seconds, _ in costs]
        cpu = min(spent for _, spent in costs) * 1000
        figures.append((max(speeds), statistics.median(speeds), 1 / cpu))
        print(f"{name:14}{max(speeds):16,.0f}{figures[-1][1]:10,.0f}{cpu:16.2f}")
    ratios = [loop / fit for fit, loop in zip(*figures, strict=True)]
    print(f"{'ratio':14}{ratios[0]:16.3f}{ratios[1]:10.3f}{ratios[2]:16.3f}")


if __name__ == "__main__":
    main()
