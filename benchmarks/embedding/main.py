"""The gain of a second rank for an embedding of 1,000,000 × 64 on TensorFlow, whose gradients are sparse.

    chorosrun -np 2 python benchmarks/embedding/main.py

Both ranks train together on one core each, and in turns rank 0 trains alone on the same batches per rank, while rank 1
sleeps: with Keras' own optimizer, and again as Keras does without choros, which reads all of the variable in each step.
Prints the rows per second of the best and the median round of all, the CPU time of rank 0 for each 1,000 of its rows,
and the ratios of two ranks to either.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np

import choros.keras as hvd

ROWS, WIDTH = 1_000_000, 64


def build(optimizer: Any, words: int, hidden: int) -> keras.Model:
    """Returns a model of ``words`` words a row: the mean or, with hidden units, a dense layer of their vectors."""
    layers = [keras.layers.GlobalAveragePooling1D()]
    if hidden:
        layers = [keras.layers.Flatten(), keras.layers.Dense(hidden, activation="relu")]
    model = keras.Sequential(
        [keras.Input((words,), dtype="int32"), keras.layers.Embedding(ROWS, WIDTH), *layers, keras.layers.Dense(1)]
    )
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    return model


def cpu_seconds() -> float:
    """Of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Marks(keras.callbacks.Callback):
    """The times of the ends of steps, without what precedes the first one."""

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self.marks: list[tuple[float, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.marks.append((time.perf_counter(), cpu_seconds()))

    def per_step(self) -> tuple[float, float]:
        """Returns the seconds and the CPU seconds of a step."""
        first, last = self.marks[0], self.marks[-1]
        steps = len(self.marks) - 1
        return (last[0] - first[0]) / steps, (last[1] - first[1]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=1024, help="rows of each rank in a step")
    parser.add_argument("--words", type=int, default=16, help="words of a row")
    parser.add_argument("--hidden", type=int, default=256, help="units of a dense layer; 0 for the mean of the words")
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    hvd.init()
    hvd.pin_device()
    draws = np.random.default_rng(hvd.rank())
    count = given.batch_size * (given.steps + 1)
    x = draws.integers(0, ROWS, (count, given.words)).astype("int32")
    y = draws.integers(0, 2, (count, 1)).astype("float32")
    alone, plain = (build(keras.optimizers.SGD(0.01), given.words, given.hidden) for _ in range(2))
    together = build(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), given.words, given.hidden)

    def train(model: keras.Model, *callbacks: keras.callbacks.Callback) -> tuple[float, float]:
        marks = Marks()
        model.fit(x, y, batch_size=given.batch_size, shuffle=False, verbose=0, callbacks=[*callbacks, marks])
        return marks.per_step()

    train(together, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    rounds: dict[str, list[tuple[float, float]]] = {"plain Keras": [], "one rank": [], "two ranks": []}
    for number in range(given.rounds + 1):
        hvd.barrier()
        if hvd.rank() == 0:
            with as_keras_reads():
                measured = [train(plain)]
            measured.append(train(alone))
        hvd.barrier()
        both = train(together, hvd.callbacks.MetricAverageCallback())
        if number and hvd.rank() == 0:  # the first round compiles
            for times, each in zip(rounds.values(), [*measured, both], strict=True):
                times.append(each)
    if hvd.rank() == 0:
        report(rounds, given.batch_size)


@contextmanager
def as_keras_reads() -> Iterator[None]:
    """A context in which steps are compiled as without choros."""
    own = keras.Variable.sparse_read
    del keras.Variable.sparse_read
    try:
        yield
    finally:
        keras.Variable.sparse_read = own


def report(rounds: dict[str, list[tuple[float, float]]], batch_size: int) -> None:
    print(f"{'':12}{'rows/s, best':>14}{'median':>12}{'CPU ms / 1,000 rows':>22}")
    figures = {}
    for name, measured in rounds.items():
        ranks = 2 if name == "two ranks" else 1
        speeds = [ranks * batch_size / seconds for seconds, _ in measured]
        cpu = min(spent for _, spent in measured) / batch_size * 1e6
        figures[name] = max(speeds), statistics.median(speeds), ranks / cpu
        print(f"{name:12}{max(speeds):14,.0f}{figures[name][1]:12,.0f}{cpu:22.2f}")
    for name in ("plain Keras", "one rank"):
        ratios = [two / one for one, two in zip(figures[name], figures["two ranks"], strict=True)]
        print(f"two ranks ÷ {name:12}{ratios[0]:7.2f}{ratios[1]:12.2f}{ratios[2]:22.2f}")


if __name__ == "__main__":
    main()
