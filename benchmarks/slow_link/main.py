"""The speed-up and the accuracy of gradient compression on a slow link: the digits CNN on two hosts, in one run.

    sudo KERAS_BACKEND=tensorflow python benchmarks/slow_link/main.py --json result.json

Makes two hosts with a link of 100 Mbit/s and 5 ms between them (see ``link.py``) and starts itself as a rank on
each. There every contender has its own model, and in each round every contender trains for an epoch, so that other
load on the machine affects all of them. Prints the steps per second of the best and the median round, as ratios to
no compression as well; the bytes that a rank sends per step; and the accuracy after all rounds.

The CNN has 0.55 million parameters and 32 images per rank and step: 2.2 MB for a few milliseconds of work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from link import CANNOT, CannotLinkError, Line, slow_link

TRAINING, BATCH = 1408, 64


@dataclass(frozen=True)
class Row:
    """One contender's figures."""

    contender: str
    best_steps_per_s: float
    median_steps_per_s: float
    ratio_of_best: float
    ratio_of_median: float
    bytes_per_step: float
    accuracy: float


def on_a_rank(rounds: int, chosen: Sequence[str], result: Path | None) -> None:
    """Trains all contenders in interleaved rounds; rank 0 reports."""
    import keras
    import numpy as np

    import choros.keras as hvd

    hvd.init()
    communicator = hvd.global_process_set.communicator
    compressions = {
        "none": hvd.Compression.none,
        "fp16": hvd.Compression.fp16,
        "bf16": hvd.Compression.bf16,
        "int8": hvd.Compression.int8,
        "top_k(0.01)": hvd.Compression.top_k(0.01),
        "power_sgd(2)": hvd.Compression.power_sgd(2),
    }

    class Clock(keras.callbacks.Callback):
        """Measures the seconds of an epoch, which begins at a barrier."""

        def on_epoch_begin(self, *_: object) -> None:
            hvd.barrier()
            self.begin = time.perf_counter()

        def on_epoch_end(self, *_: object) -> None:
            self.seconds = time.perf_counter() - self.begin

    def build(contender: str) -> tuple[keras.Model, list[keras.callbacks.Callback]]:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(2),
                layers.Flatten(),
                layers.Dense(512, activation="relu"),
                layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam()
        more = []
        if contender in compressions:
            optimizer = hvd.DistributedOptimizer(optimizer, compression=compressions[contender])
        else:
            more = [hvd.LocalSGDCallback(every=11)]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=keras.backend.backend() == "jax")
        return model, more

    digits = np.load(Path(__file__).parents[2] / "examples" / "digits.npz")
    order = np.random.default_rng(0).permutation(len(digits["labels"]))
    x, y = (digits["images"][order, :, :, np.newaxis] / 16).astype("float32"), digits["labels"][order]
    mine = slice(communicator.rank, TRAINING, communicator.size)
    steps = TRAINING // BATCH

    models = {name: build(name) for name in [*compressions, "local_sgd(11)"] if not chosen or name in chosen}
    rates: dict[str, list[float]] = {name: [] for name in models}
    sent = dict.fromkeys(models, 0)
    for epoch in range(rounds + 1):
        for name, (model, more) in models.items():
            clock, before = Clock(), communicator.bytes_sent
            same_order = np.random.default_rng(epoch).permutation(TRAINING // communicator.size)
            parts = (part[mine][same_order] for part in (x, y))
            model.fit(*parts, batch_size=BATCH // communicator.size, verbose=0, shuffle=False, callbacks=[*more, clock])
            if epoch:  # the first epoch also compiles
                rates[name].append(steps / clock.seconds)
                sent[name] += communicator.bytes_sent - before
        if communicator.rank == 0 and epoch:
            print(f"round {epoch}: " + ", ".join(f"{name} {rate[-1]:.2f}" for name, rate in rates.items()), flush=True)

    rows = []
    for name, (model, _) in models.items():
        best, median = max(rates[name]), statistics.median(rates[name])
        accuracy = model.evaluate(x[TRAINING:], y[TRAINING:], verbose=0, return_dict=True)["accuracy"]
        ratios = best / max(rates["none"]), median / statistics.median(rates["none"])
        rows.append(Row(name, best, median, *ratios, sent[name] / rounds / steps, float(accuracy)))
    if communicator.rank == 0:
        report(rows, rounds, result)


def report(rows: Sequence[Row], rounds: int, result: Path | None) -> None:
    """Prints a table, and writes a file if requested."""
    print(f"\n{'':<14}{'steps/s: best':>14}{'median':>8}{'ratio: best':>13}{'median':>8}{'bytes':>11}{'accuracy':>10}")
    for row in rows:
        print(
            f"{row.contender:<14}{row.best_steps_per_s:>14.2f}{row.median_steps_per_s:>8.2f}{row.ratio_of_best:>13.2f}"
            f"{row.ratio_of_median:>8.2f}{row.bytes_per_step:>11,.0f}{row.accuracy:>10.4f}"
        )
    if result is not None:
        machine = f"{platform.platform()}, {os.cpu_count()} cores"
        result.write_text(json.dumps({"machine": machine, "rounds": rounds, "rows": list(map(asdict, rows))}, indent=2))


def main() -> int:
    """Creates the link and starts a rank on each host, or runs as one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s, each way")
    parser.add_argument("--delay", type=float, default=5, help="ms, each way")
    parser.add_argument(
        "--contenders", nargs="*", default=[], help="the contenders to measure, which must include none (default: all)"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--on-a-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_a_rank:
        on_a_rank(arguments.rounds, arguments.contenders, arguments.json)
        return 0
    try:
        with slow_link(Line(arguments.rate * 1e6, arguments.delay / 1e3)) as link:
            print(f"{arguments.rate:g} Mbit/s and {arguments.delay:g} ms each way, by {link.kind}", flush=True)
            return link.run([sys.executable, *sys.argv, "--on-a-rank"])
    except CannotLinkError as error:
        print(error, file=sys.stderr)
        return CANNOT


if __name__ == "__main__":
    sys.exit(main())
