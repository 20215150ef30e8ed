"""Steps of ranks: a sleep, then the reduction, in each setting; recorded (``--record``) or measured (``--measure``)."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import choros
from choros.parallel.compression import Compression
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer

COMPUTE, EVERY, POWER, BUCKET = 0.2, 4, 4, 1 << 20
SHAPES = [(512, 512)] * 4 + [(512,)] * 4


def loops(gradients: list[np.ndarray]) -> dict[str, tuple[Callable[[], object], int]]:
    """Of each setting, what makes some steps, and their number."""
    layout = tuple((each.shape, each.dtype) for each in gradients)

    def reducing(name: str, compressor: object = Compression.none, steps: int = 1) -> tuple[Callable[[], object], int]:
        reducer = GradientReducer(ReduceConfig(compressor=compressor), name)
        return lambda: (time.sleep(COMPUTE * steps), reducer.reduce(gradients, examples=8)), steps

    overlapping = GradientReducer(ReduceConfig(bucket_bytes=BUCKET), "overlap")

    def overlapped() -> None:
        begin, buckets = time.perf_counter(), overlapping.plan(layout)
        for number, indices in enumerate(buckets, 1):
            ready = begin + COMPUTE * (1 + 2 * number / len(buckets)) / 3
            time.sleep(max(0.0, ready - time.perf_counter()))
            overlapping.send(number - 1, [gradients[index] for index in indices], examples=8)

    return {
        "plain": reducing("plain"),
        "fp16": reducing("fp16", Compression.fp16),
        "int8": reducing("int8", Compression.int8),
        f"power_sgd({POWER})": reducing("power", Compression.power_sgd(POWER)),
        f"DiLoCo, every {EVERY}": reducing("local", steps=EVERY),
        "overlap": (overlapped, 1),
    }


def measure(rounds: int, result: Path) -> None:
    """Measures all settings in interleaved rounds; rank 0 writes the seconds of a step in each round."""
    communicator = choros.global_process_set.communicator
    generator = np.random.default_rng(communicator.rank)
    ways = loops([generator.standard_normal(shape, np.float32) for shape in SHAPES])
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (loop, steps) in ways.items():
            communicator.barrier()
            loop()  # from here on, each step begins at the end of another
            begin = time.perf_counter()
            for _ in range(3):
                loop()
            if number:
                seconds[name].append((time.perf_counter() - begin) / 3 / steps)
    if communicator.rank == 0:
        result.write_text(json.dumps(seconds))


def calibrate(result: Path) -> None:
    """Measures allreduces; rank 0 writes their sizes and median seconds."""
    communicator = choros.global_process_set.communicator
    sizes, medians = [64, 4 << 10, 256 << 10, 1 << 20, 4 << 20], []
    for size in sizes:
        array, seconds = np.ones(size // 4, np.float32), []
        for _ in range(12):
            begin = time.perf_counter()
            communicator.allreduce(array)
            seconds.append(time.perf_counter() - begin)
        medians.append(statistics.median(seconds[2:]))
    if communicator.rank == 0:
        result.write_text(json.dumps([sizes, medians]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", metavar="SETTING")
    parser.add_argument("--calibrate", metavar="FILE", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("ROUNDS", "FILE"))
    arguments = parser.parse_args()
    choros.init()
    if arguments.record:
        loop, _ = loops([np.ones(shape, np.float32) for shape in SHAPES])[arguments.record]
        for _ in range(40):
            loop()
    elif arguments.calibrate:
        calibrate(arguments.calibrate)
    else:
        measure(int(arguments.measure[0]), Path(arguments.measure[1]))
    choros.shutdown()


if __name__ == "__main__":
    main()
