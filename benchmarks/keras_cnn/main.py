"""What choros costs one rank, and what a second rank gains: the digits CNN, in one run.

    chorosrun -np 2 python benchmarks/keras_cnn/main.py --json result.json

Two ranks with a core each run the contenders in turn, a step each, round after round, so that all of them meet
the same machine: *plain* Keras on rank 0 alone; the same with ``DistributedOptimizer`` on rank 0 alone; both
ranks together; and plain Keras on both at once, each for itself, which is what the machine allows.

A contender's figure is its best round, which other work on the machine disturbs least: shared machines slow
single cores down by exact factors of two for a second or so, and two ranks go as fast as the slower of their
cores. The median and the CPU time stand beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import keras
import numpy as np

import choros.keras as hvd

WARM_UP_ROUNDS = 5


@dataclass(frozen=True)
class Round:
    """One contender's round: images a second of all its ranks, and CPU seconds of rank 0."""

    images_per_s: float
    cpu_s: float


def build(distributed_over: object | None) -> keras.Model:
    """The CNN of ``examples/mnist_horovod.py``."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
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
    optimizer = keras.optimizers.Adam()
    if distributed_over is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=distributed_over)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False if is_tensorflow() else "auto")
    return model


def is_tensorflow() -> bool:
    return keras.backend.backend() == "tensorflow"


def measure(model: keras.Model, images: np.ndarray, labels: np.ndarray, ranks: int) -> Round:
    """One step."""
    cpu, begin = cpu_seconds(), time.perf_counter()
    model.train_on_batch(images, labels)
    return Round(ranks * len(images) / (time.perf_counter() - begin), cpu_seconds() - cpu)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def wait_for_rank_0() -> None:
    """A barrier that leaves the waiting rank's core, and the memory bus, to the other."""
    from mpi4py import MPI

    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured steps of each contender (default: 30)")
    parser.add_argument("--batch-size", type=int, default=2048, help="images of a rank's batch (default: 2048)")
    parser.add_argument("--json", type=Path, help="write all rounds to this file")
    arguments = parser.parse_args()

    hvd.init()
    hvd.pin_device()
    if hvd.size() != 2:
        raise SystemExit("this benchmark compares two ranks with one: start it with chorosrun -np 2.")
    alone = hvd.add_process_set([0])
    contenders: dict[str, tuple[int, keras.Model]] = {
        "plain Keras, 1 rank": (1, build(None)),
        "choros, 1 rank": (1, build(alone)),
        "choros, 2 ranks": (2, build(hvd.global_process_set)),
        "plain Keras, twice": (2, build(None)),
    }
    generator = np.random.default_rng(hvd.rank())
    images = generator.random((arguments.batch_size, 28, 28, 1), np.float32)
    labels = generator.integers(0, 10, len(images))

    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    for number in range(WARM_UP_ROUNDS + arguments.rounds):
        for name, (ranks, model) in contenders.items():
            wait_for_rank_0()
            if hvd.rank() < ranks:
                result = measure(model, images, labels, ranks)
                if number >= WARM_UP_ROUNDS:
                    rounds[name].append(result)
        if hvd.rank() == 0 and number % 10 == 9:
            print(f"round {number + 1} of {WARM_UP_ROUNDS + arguments.rounds}", flush=True)
    wait_for_rank_0()
    if hvd.rank() == 0:
        report(rounds, arguments.json)


def report(rounds: dict[str, list[Round]], file: Path | None) -> None:
    """The table, the two ratios that matter, and the file."""
    speeds = {name: [each.images_per_s for each in results] for name, results in rounds.items()}
    print(f"\n{'':22}{'best images/s':>15}{'median images/s':>17}{'CPU s a round':>15}")
    for name, results in rounds.items():
        cpu = statistics.median(each.cpu_s for each in results)
        print(f"{name:22}{max(speeds[name]):15,.0f}{statistics.median(speeds[name]):17,.0f}{cpu:15.2f}")
    plain, one, two, twice = speeds.values()
    print()
    for what, ours, theirs in (
        ("choros, 1 rank / plain Keras", one, plain),
        ("2 ranks / 1 rank", two, plain),
        ("what the machine allows", twice, plain),
    ):
        print(f"{what:30} best {ratio(max, ours, theirs):.3f}, median {ratio(statistics.median, ours, theirs):.3f}")
    if file is not None:
        machine = (
            f"{platform.processor() or platform.machine()}, {platform.system()}, Python {platform.python_version()}"
        )
        rows = {name: [asdict(each) for each in results] for name, results in rounds.items()}
        file.write_text(
            json.dumps({"machine": machine, "framework": keras.backend.backend(), "rounds": rows}, indent=1)
        )


def ratio(of: Callable[[list[float]], float], ours: list[float], theirs: list[float]) -> float:
    return of(ours) / of(theirs)


if __name__ == "__main__":
    main()
