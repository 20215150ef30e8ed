"""Training on GPUs: images/s of a CNN at a global batch of 4096, plain Keras against choros, on each framework.

    python benchmarks/gpu/main.py                                    all installed frameworks, a rank for each GPU
    python benchmarks/gpu/main.py --ranks 4 --frameworks torch jax   four ranks, which may share cards

With one GPU, one rank trains, and two that share the card. Gradients of TensorFlow and PyTorch move by nccl4py and by
torch.distributed, each where it can be used; TensorFlow's by nccl4py in processes that cannot import PyTorch.

The model is the CNN of Horovod's and tf.distribute's MNIST scripts, on 60,000 random images of 28 × 28 in mixed
precision. MirroredStrategy made 222,244 images/s with it on 8 V100 (a DGX-1). The rounds of all contenders are
interleaved: each starts a job, which trains some epochs; the first epoch, which compiles, is not counted.

Without a GPU it runs as well: try it with --images 2048 --batch-size 256 --epochs 3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from choros.comm.devices import nccl4py_problem
from choros.launch.driver.machine import count_accelerators

CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))
FRAMEWORKS = ("tensorflow", "torch", "jax")
#: images/s of the same model under tf.distribute's MirroredStrategy on 8 V100.
EIGHT_V100 = 222_244


#: Ranks that share a card share its memory.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}


@dataclass(frozen=True)
class Contender:
    """A framework, with plain Keras in one process (no ranks), or with choros on some ranks.

    Attributes:
        framework: its name.
        ranks: their number.
        devices: what moves gradients between them: a value of ``CHOROS_DEVICES``, or ``xla``.
    """

    framework: str
    ranks: int = 0
    devices: str = "auto"

    def __str__(self) -> str:
        if not self.ranks:
            return f"{self.framework}, Keras"
        by = f", {self.devices}" + ", without PyTorch" * self.without_torch if self.ranks > 1 else ""
        return f"{self.framework}, choros on {self.ranks} rank{'s' * (self.ranks > 1)}{by}"

    @property
    def without_torch(self) -> bool:
        return self.framework == "tensorflow" and self.devices == "nccl4py"

    def epochs(self, arguments: list[str]) -> list[float]:
        """Runs the training in processes of their own; returns images/s of each epoch after the first."""
        command = [sys.executable, __file__, "--train", *arguments]
        if self.ranks:
            command = [CHOROSRUN, "-np", str(self.ranks), "--no-prefix-output", *command, "--distributed"]
        if self.without_torch:
            command.append("--without-torch")
        # On JAX, ranks reduce gradients inside their compiled step.
        how = {"CHOROS_ENGINE": "xla"} if self.devices == "xla" else {"CHOROS_DEVICES": self.devices}
        shared = SHARED if self.ranks > count_accelerators() else {}
        environ = {**shared, **os.environ, **how, "KERAS_BACKEND": self.framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
        return list(json.loads(done.stdout.strip().splitlines()[-1]))


def train(args: argparse.Namespace) -> None:
    """Trains in this process, or as one of the ranks; the first one prints images/s of the epochs after the first."""
    if args.without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # it cannot be imported
    import keras
    import numpy as np

    from choros import distribute

    if args.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    generator = np.random.default_rng(0)
    x = generator.random((args.images, 28, 28, 1), np.float32)
    y = generator.integers(0, 10, args.images)
    layers = keras.layers
    with distribute.MirroredStrategy().scope() if args.distributed else nullcontext():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            keras.Input((28, 28, 1)),
            *(layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu")),
            *(layers.MaxPooling2D(2), layers.Dropout(0.25), layers.Flatten()),
            *(layers.Dense(128, activation="relu"), layers.Dropout(0.5), layers.Dense(10, dtype="float32")),
        ])  # fmt: skip
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    marks = [time.perf_counter()]
    mark = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: marks.append(time.perf_counter()))
    model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, callbacks=[mark], verbose=0)
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == 0:
        print(json.dumps([args.images / (end - begun) for begun, end in pairwise(marks[1:])]), flush=True)


def contenders_of(framework: str, ranks: int | None) -> list[Contender]:
    """Returns those of a framework: plain Keras, and choros with each library that can move gradients here."""
    cards = count_accelerators()
    counts = [ranks] if ranks else sorted({max(1, cards), max(2, cards)})
    libraries = ["xla"] if framework == "jax" else []
    if framework != "jax":
        usable = {"nccl4py": not nccl4py_problem(), "torch": importlib.util.find_spec("torch") is not None}
        libraries = [library for library, is_usable in usable.items() if is_usable] or ["host"]
    of = [
        Contender(framework, count, library) for count in counts for library in libraries[: 1 if count == 1 else None]
    ]
    return [Contender(framework), *of]


def compare(args: argparse.Namespace, arguments: list[str]) -> None:
    """Runs all contenders in turn, and prints the table."""
    installed = [name for name in args.frameworks if importlib.util.find_spec(name) is not None]
    contenders = [each for name in installed for each in contenders_of(name, args.ranks)]
    rates: dict[Contender, list[float]] = {contender: [] for contender in contenders}
    for number in range(args.rounds):
        for contender in contenders:
            rates[contender] += contender.epochs(arguments)
            best = max(rates[contender])
            print(f"round {number + 1} of {args.rounds}: {contender}: {best:,.0f} images/s", file=sys.stderr)
    print("| contender | best images/s | median | ÷ 8 V100 |\n|---|---|---|---|")
    for contender, measured in rates.items():
        best, median = max(measured), statistics.median(measured)
        print(f"| {contender} | {best:,.0f} | {median:,.0f} | {best / EIGHT_V100:.2f} |")


def main() -> None:
    """Reads the arguments; runs the contenders, or is one of their processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", default=FRAMEWORKS, choices=FRAMEWORKS)
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs, and two if there is one")
    parser.add_argument("--rounds", type=int, default=3)
    training = parser.add_argument_group("training")
    training.add_argument("--images", type=int, default=60_000)
    training.add_argument("--batch-size", type=int, default=4096, help="of all ranks together")
    training.add_argument("--epochs", type=int, default=8)
    training.add_argument("--mixed-precision", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--distributed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without-torch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    given = {"--images": args.images, "--batch-size": args.batch_size, "--epochs": args.epochs}
    arguments = [text for flag, value in given.items() for text in (flag, str(value))]
    compare(args, [*arguments, "--mixed-precision" if args.mixed_precision else "--no-mixed-precision"])


if __name__ == "__main__":
    main()
