"""The speed of thread settings with two ranks on one host: the reason for chorosrun's defaults.

    python benchmarks/threads/main.py --framework tensorflow --rounds 3

For every setting of the framework's pools, two ranks train the CNN of ``examples/mnist_horovod.py``; the rounds of
the settings are interleaved. Prints the images/s of the best and the median round, and their ratios to chorosrun's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))
BATCH, STEPS = 128, 24
ALL = str(os.cpu_count() or 1)

#: The variables that differ from chorosrun's settings.
SETTINGS: dict[str, dict[str, dict[str, str]]] = {
    "tensorflow": {
        "chorosrun's": {},
        "2 operations at once": {"TF_NUM_INTEROP_THREADS": "2"},
        "pools for all cores": {"TF_NUM_INTEROP_THREADS": ALL, "TF_NUM_INTRAOP_THREADS": ALL, "OMP_NUM_THREADS": ALL},
        "without oneDNN": {"TF_ENABLE_ONEDNN_OPTS": "0"},
    },
    "torch": {
        "chorosrun's": {},
        "pools for all cores": {"OMP_NUM_THREADS": ALL, "MKL_NUM_THREADS": ALL},
        "without oneDNN": {"CHOROS_BENCH_MKLDNN": "0"},
    },
    "jax": {
        "chorosrun's": {},
        "pool for all cores": {"NPROC": ALL},
        "Eigen on one thread": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
    },
}


def train() -> None:
    import keras
    import numpy as np

    import choros.keras as hvd
    from choros.bench.processes.keras_fit import compiled

    if os.environ.get("CHOROS_BENCH_MKLDNN") == "0":
        import torch

        torch.backends.mkldnn.enabled = False
    hvd.init()
    hvd.pin_device()
    model = compiled("cnn", hvd.DistributedOptimizer)
    x = np.random.default_rng(hvd.rank()).normal(size=(BATCH * STEPS, 28, 28, 1)).astype("float32")
    y = np.arange(len(x)) % 10
    marks: list[float] = []
    mark = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: marks.append(time.perf_counter()))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), mark]
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    seconds = hvd.allreduce(marks[-1] - marks[3], op=hvd.Max)  # the first steps compile
    if hvd.rank() == 0:
        print(f"images/s {BATCH * (STEPS - 4) * hvd.size() / float(seconds):.1f}")


def images_per_s(framework: str, environ: dict[str, str]) -> float:
    command = [CHOROSRUN, "-np", "2", "--no-prefix-output", sys.executable, __file__, "--train"]
    environ = {**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3", **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300)
    return float(done.stdout.split("images/s")[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=list(SETTINGS), default="tensorflow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train()
        return
    settings = SETTINGS[given.framework]
    measured: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(given.rounds):
        for name, environ in settings.items():
            print(f"round {number + 1} of {given.rounds}: {name}", file=sys.stderr)
            measured[name].append(images_per_s(given.framework, environ))
    ours = measured["chorosrun's"]
    print(f"{given.framework:24} best   median  ÷ best  ÷ median")
    for name, values in measured.items():
        best, median = max(values), statistics.median(values)
        print(f"{name:22} {best:7.0f} {median:7.0f} {best / max(ours):8.2f} {median / statistics.median(ours):8.2f}")


if __name__ == "__main__":
    main()
