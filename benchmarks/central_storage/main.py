"""The memory that CentralStorageStrategy saves in each process, compared with MirroredStrategy.

    python benchmarks/central_storage/main.py --framework tensorflow

Two processes train an MLP of 20 million parameters (80 MB) with Adam, whose state is twice that. Prints the size
of the optimizer state in each process, and its peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))
STRATEGIES = ("mirrored", "central")
MIB = 1 << 20


def train(name: str) -> None:
    import keras
    import numpy as np

    import choros
    from choros import distribute

    kinds = {"mirrored": distribute.MirroredStrategy, "central": distribute.experimental.CentralStorageStrategy}
    with kinds[name]().scope():
        dense = [keras.layers.Dense(4096, "relu"), keras.layers.Dense(4096, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((784,)), *dense])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(256, 784)).astype("float32")
    model.fit(x, np.arange(len(x)) % 10, batch_size=64, epochs=1, verbose=0)
    state = sum(int(np.prod(variable.shape)) * 4 for variable in model.optimizer.variables)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rank": choros.rank(), "state": state / MIB, "peak": peak}), flush=True)


def measure(name: str, framework: str) -> list[dict[str, float]]:
    command = [CHOROSRUN, "-np", "2", "--no-prefix-output", sys.executable, __file__, "--train", name]
    environ = {**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(rows, key=lambda row: row["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="tensorflow", choices=("tensorflow", "torch", "jax"))
    parser.add_argument("--train", choices=STRATEGIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    print(f"{arguments.framework:12} {'process':>8} {'optimizer state':>16} {'peak memory':>12}")
    for name in STRATEGIES:
        for row in measure(name, arguments.framework):
            print(f"{name:12} {row['rank']:8} {row['state']:12,.0f} MiB {row['peak']:8,.0f} MiB")


if __name__ == "__main__":
    main()
