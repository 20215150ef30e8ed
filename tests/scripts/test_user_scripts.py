"""Scripts as users bring them, with only an import changed: on two ranks they print the losses of one process.

Each was written anew from a published page: TensorFlow's distribution tutorials, in the order of their cells, and
courses on Horovod. The data is small and made up; names that Keras 3 or TensorFlow 2 has dropped are replaced as
docs/older_scripts.md says. The first script starts TensorFlow before it creates a strategy.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from harness import CHOROSRUN, FRAMEWORKS
from ranks import pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.program,
    pytest.mark.timeout(900),
    pytest.mark.skipif("tensorflow" not in FRAMEWORKS, reason="the scripts import TensorFlow"),
]

RUN = str(Path(__file__).with_name("run.py"))
SCRIPTS = (
    "distributed_input",
    "custom_loop",
    "mirrored_fit",
    "multi_worker_loop",
    "multi_worker_fit",
    "horovod_unet",
    "horovod_cifar",
    "horovod_mnist",
    "horovod_tape",
    "horovod_synthetic",
)
GLOBAL_BATCH, RATE = 16, 0.02
#: Lines with the same numbers on any number of processes; and on all ranks of one job, which shuffle on their own.
OF_ALL_DATA = re.compile(r"(Loss|Epoch \d+,|Epoch:|Eval|Accuracy)")
OF_ALL_RANKS = re.compile(r"Of all ranks")


def start(directory: Path, ranks: int) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PER_REPLICA": str(GLOBAL_BATCH // ranks),
        "RATE": str(RATE / ranks),
    }
    launcher = [CHOROSRUN, "-np", str(ranks), "--output-dir", str(directory / "output")] if ranks > 1 else []
    return subprocess.Popen(
        [*launcher, sys.executable, RUN, *SCRIPTS],
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@dataclass(frozen=True)
class Outputs:
    """What one process and each of two ranks have printed; and the last lines of runs that have failed."""

    one: str
    ranks: list[str]
    failures: list[str]


@functools.cache
def outputs() -> Outputs:
    """Runs all scripts in one process, and in one job."""
    with tempfile.TemporaryDirectory() as directory:
        folders = [Path(directory, name) for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
        processes = [start(folder, ranks) for ranks, folder in enumerate(folders, 1)]
        texts = [process.communicate(timeout=800)[0] for process in processes]
        failures = [text[-5000:] for process, text in zip(processes, texts, strict=True) if process.returncode != 0]
        ranks = [(folders[1] / f"output/rank.{rank}/stdout").read_text() for rank in range(2)]
        return Outputs(texts[0], ranks, failures)


pool.FORGET.append(outputs.cache_clear)


def numbers(text: str, script: str, lines: re.Pattern[str]) -> list[float]:
    """The numbers in these lines of a script's output."""
    (own,) = re.findall(rf"^# {script}\n(.*?)(?=^# |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    chosen = [line for line in own.splitlines() if lines.match(line)]
    return [float(number) for line in chosen for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", line)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_print_what_one_process_prints(script: str) -> None:
    printed = outputs()
    assert not printed.failures, printed.failures[0]
    expected = numbers(printed.one, script, OF_ALL_DATA)
    for rank in printed.ranks:
        np.testing.assert_allclose(numbers(rank, script, OF_ALL_DATA), expected, rtol=1e-4)
    first, second = (numbers(rank, script, OF_ALL_RANKS) for rank in printed.ranks)
    np.testing.assert_array_equal(first, second)
    assert expected or first


def test_one_worker_is_the_chief() -> None:
    assert [rank.count("not the chief") for rank in outputs().ranks] == [0, 1]
