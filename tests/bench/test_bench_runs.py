"""The commands, run for real: they end, and write their files. No test depends on a time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness import FRAMEWORKS

pytestmark = pytest.mark.slow

CHOROS = [sys.executable, "-m", "choros"]
BENCH = [*CHOROS, "bench"]
ONCE = ["--rounds", "1", "--burst", "0.001"]


def run(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *words], capture_output=True, text=True, timeout=timeout)


def test_allreduce(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    only = [word for name in ("mpi4py", "torch Gloo", "Horovod", "memcpy") for word in ("--only", name)]
    done = run("allreduce", "--sizes", "4KiB", *only, *ONCE, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "--rounds 1: too few for a comparison" in done.stdout
    assert "skipped: Horovod" in done.stdout or "Horovod " in done.stdout
    written = json.loads(file.read_text())
    assert {"cpu", "cores", "memory_bytes", "os", "python", "versions"} <= written["machine"].keys()
    rows = {row["peer"]: row for row in written["rows"] if row["bench"] == "allreduce"}
    assert {"choros", "mpi4py", "memcpy"} <= rows.keys()
    assert ("torch Gloo" in rows) == ("torch" in FRAMEWORKS)
    assert all((row["ranks"], row["bytes"], row["dtype"]) == (2, 4096, "float32") for row in rows.values())
    assert all(0 < row["best_s"] <= row["median_s"] for row in rows.values())
    assert all(row["cpu_s"] >= 0 for row in rows.values())
    assert {row["bytes"] for row in written["rows"] if row["bench"] == "grouped"} == {467_012, 31_038_084}


@pytest.mark.nightly
@pytest.mark.parametrize("framework", [name for name in ("torch", "jax", "tensorflow") if name in FRAMEWORKS][:1])
def test_train(framework: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--framework", framework, "--model", "cnn", "--batch-size", "2"]
    peers = {"torch": {"torch DDP"}, "tensorflow": {"MirroredStrategy", "MultiWorkerMirroredStrategy"}}
    others = peers.get(framework, {"keras.distribution (processes)", "keras.distribution (devices)"})
    only = [word for name in others for word in ("--only", name)]
    done = run("train", *options, *only, *ONCE, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {"choros", *others} <= {row["peer"] for row in rows}, done.stdout
    for row in rows:
        assert (row["bench"], row["framework"], row["model"], row["ranks"]) == ("train", framework, "cnn", 2)
        assert row["images_per_s"] == pytest.approx(4 / row["best_s"])


def test_ctrl_c_ends_everything() -> None:
    process = subprocess.Popen([*BENCH, "allreduce"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    descendants: list[psutil.Process] = []
    while len(descendants) < 3:  # a launcher, its children and their children
        descendants = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["allreduce", "--sizes", "4KB"], "Write sizes like 4KiB"),
        (["allreduce", "--ranks", "two"], "expected positive whole numbers"),
        (["allreduce", "--only", "gloo"], "Expected one of: 'choros', 'choros, any array'"),
        (["allreduce", "--json", "/no/such/place"], "cannot be written"),
        (["train", "--framework", "theano"], "'theano' is not one of"),
        (["overhead", "--rounds", "0"], "is not in the range"),
    ],
)
def test_invalid_arguments(argv: list[str], text: str) -> None:
    done = run(*argv)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_help_teaches() -> None:
    for words, text in (([], "choros bench train"), (["bench", "--help"], "Exit codes")):
        done = subprocess.run([*CHOROS, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0
        assert text in done.stdout
    done = subprocess.run([*CHOROS, "--version"], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("choros ")


def test_start(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run("start", "--rounds", "1", "--only", "mpirun", "--only", "mpi4py", "--only", "numpy", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {(row["case"], row["peer"], row["ranks"]) for row in rows} == {
        ("python -c pass", "choros", 2),
        ("python -c pass", "mpirun", 2),
        ("a first allreduce of 3 numbers", "choros", 2),
        ("a first allreduce of 3 numbers", "mpi4py", 2),
        ("import", "choros", 1),
        ("import", "numpy", 1),
    }


@pytest.mark.skipif("jax" not in FRAMEWORKS, reason="requires JAX")
def test_keras_distribution_trains_on_all_devices() -> None:
    """``clear_session``, which precedes each case, takes the distribution away: a plain model would be measured."""
    program = (
        "from choros.bench.cases import TrainCase\n"
        "from choros.bench.processes.keras_fit import distribution\n"
        "prepare = distribution()\n"
        "for case in (TrainCase('cnn', 2), TrainCase('cnn', 3)):\n"
        "    task = prepare(case)\n"
        "    task.run(1)\n"
        "    task.check()\n"
        "import keras\n"
        "print(len(keras.distribution.distribution().device_mesh.devices))\n"
    )
    environ = {**os.environ, "KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environ)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
