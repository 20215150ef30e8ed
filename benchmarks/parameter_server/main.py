"""The gain of asynchronous training when one of two workers is slower: steps per second of both workers together.

    python benchmarks/parameter_server/main.py --framework torch --rounds 3

Both train the same small network on batches of the same size; before each step the fast worker sleeps ``--step``
milliseconds, the slow one ``--slower`` times as many, so that the cores have room for both. Synchronous training
(``choros.keras``) waits for the slow one at every step; ``ParameterServerStrategy`` does not. Their rounds are
interleaved, and the first epoch of each is not counted. Prints the best and the median round of each, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))
BATCH, STEPS = 32, 60
START = {"synchronous": ["-np", "2"], "asynchronous": ["--ps", "1", "-np", "2"]}


def sleepy(seconds: float) -> Any:
    """Returns the network, which sleeps before each step."""
    import keras

    class Sleepy(keras.Sequential):
        def make_train_function(self, force: bool = False) -> None:
            before = self.train_function
            super().make_train_function(force)
            if self.train_function is not before:
                own = self.train_function

                def step(*given: Any) -> Any:
                    time.sleep(seconds)
                    return own(*given)

                self.train_function = step

    return Sleepy([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])


def train(kind: str, step: float, slower: float) -> None:
    """Trains in each process; one of them prints the steps per second of all."""
    import keras
    import numpy as np

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    marks: list[float] = []
    mark = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_, **__: marks.append(time.perf_counter()))
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 64)).astype("float32")
    y = np.arange(len(x)) % 10
    if kind == "synchronous":
        import choros.keras as hvd

        hvd.init()
        model = sleepy(step * (slower if hvd.rank() == 1 else 1))
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), mark]
        x, y = x[hvd.rank() :: 2], y[hvd.rank() :: 2]
        prints = hvd.rank() == 0
    else:
        from choros.parameter_server import ParameterServerStrategy

        role = json.loads(os.environ["TF_CONFIG"])["task"]
        strategy = ParameterServerStrategy()
        with strategy.scope():
            model = sleepy(step * (slower if role["index"] == 1 else 1))
            model.compile(keras.optimizers.SGD(0.01), loss)
        callbacks, prints = [mark], True
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=callbacks)
    if prints:
        print(f"steps/s {2 * STEPS / (marks[-1] - marks[0]):.1f}")


def steps_per_s(kind: str, given: argparse.Namespace) -> float:
    """Returns the steps per second of one round."""
    own = ["--train", kind, "--step", str(given.step), "--slower", str(given.slower)]
    command = [CHOROSRUN, *START[kind], "--no-prefix-output", sys.executable, __file__, *own]
    environ = {**os.environ, "KERAS_BACKEND": given.framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return float(done.stdout.split("steps/s")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["tensorflow", "torch", "jax"], default="torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=float, default=20, help="milliseconds that a step of the fast worker takes")
    parser.add_argument("--slower", type=float, default=4, help="how many times as long one of the slow worker takes")
    parser.add_argument("--train", choices=list(START), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.step / 1000, given.slower)
        return
    measured: dict[str, list[float]] = {kind: [] for kind in START}
    for number in range(given.rounds):
        for kind in START:
            print(f"round {number + 1} of {given.rounds}: {kind}", file=sys.stderr)
            measured[kind].append(steps_per_s(kind, given))
    sync = measured["synchronous"]
    print(f"steps/s of both workers    best   median  ÷ best  ÷ median     ({given.framework})")
    for kind, values in measured.items():
        best, median = max(values), statistics.median(values)
        print(f"{kind:24} {best:7.1f} {median:7.1f} {best / max(sync):8.2f} {median / statistics.median(sync):8.2f}")


if __name__ == "__main__":
    main()
