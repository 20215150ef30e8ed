"""``choros bench memory``, and what slices of the state are for: a model that fits only with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from choros.bench.contender import ContenderFailed
from choros.bench.memory import measure_all, ratios, row_of, table, width_of
from choros.bench.report import Row
from choros.observe.processes import peak_bytes, reset_peak, resident_bytes
from harness import CHOROSRUN, FRAMEWORKS, TESTS, needs
from launch.launched import HIDDEN
from ranks.environment import QUICK, hiding_path

MIB = 1 << 20
#: Of the limited model; and the bytes for each of them, between 28, with which ranks with slices train, and 32, with
#: which those without do not: weights, gradients and state of 16 bytes or 12, what Keras' Adam makes, copies.
PARAMETERS, BUDGET = 32_000_000, 30
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's counts of Linux")


def rows(sliced: int) -> list[Row]:
    return [
        row_of("torch", False, 2, 4 * MIB, 100 * MIB, 164 * MIB),
        row_of("torch", True, 2, 4 * MIB, 100 * MIB, 100 * MIB + sliced),
    ]


def test_the_ratio_is_that_of_training() -> None:
    assert ratios(rows(48 * MIB)) == (0.75, 148 / 164)
    assert ratios(rows(48 * MIB)[:1]) is None


def test_the_table_says_whether_the_bound_holds() -> None:
    found = table(rows(48 * MIB))
    ((label, cells),) = found.sections
    assert label == "torch"
    assert cells == [
        ["without", "100 MiB", "164 MiB", "64 MiB", "16.0 bytes"],
        ["with shard_state", "100 MiB", "148 MiB", "48 MiB", "12.0 bytes"],
    ]
    assert "0.750 of the memory of training, within the bound of 0.80" in found.notes[0]
    assert "above the bound" in table(rows(60 * MIB)).notes[0]


def test_a_row_of_the_file() -> None:
    assert rows(48 * MIB)[1] == {
        "bench": "memory",
        "peer": "choros",
        "framework": "torch",
        "shard_state": True,
        "ranks": 2,
        "parameters": 4 * MIB,
        "before_bytes": 100 * MIB,
        "peak_bytes": 148 * MIB,
        "training_bytes": 48 * MIB,
    }


def test_a_job_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(framework: str, shard_state: bool, ranks: int, parameters: int) -> Row:
        if shard_state:
            raise ContenderFailed("no memory")
        return row_of(framework, shard_state, ranks, parameters, 1, 2)

    monkeypatch.setattr("choros.bench.memory.measure", measure)
    found, failed = measure_all(["torch", "jax"], 2, 100, lambda _text: None)
    assert [row["framework"] for row in found] == ["torch", "jax"]
    assert failed == ["torch, with shard_state: no memory", "jax, with shard_state: no memory"]


def test_the_width_of_a_layer() -> None:
    assert [width_of(number) for number in (25, 2500, 100_000_000)] == [1, 10, 2000]


@linux
def test_the_peak_begins_anew() -> None:
    held = bytearray(64 * MIB)
    high = peak_bytes()
    del held
    assert reset_peak()
    now = resident_bytes()
    assert now is not None
    assert now <= peak_bytes() <= high - 32 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS[:1])
def test_the_command(framework: str, tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    command = [sys.executable, "-m", "choros", "bench", "memory", "--framework", framework, "--parameters", "10000"]
    environ = {**os.environ, **QUICK, "PYTHONPATH": hiding_path(*HIDDEN[framework])}
    done = subprocess.run(
        [*command, "--json", str(file)], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{framework}: with shard_state" in done.stdout
    written = json.loads(file.read_text())["rows"]
    assert [(row["framework"], row["shard_state"], row["ranks"]) for row in written] == [
        (framework, False, 2),
        (framework, True, 2),
    ]
    assert all(row["parameters"] == 10000 and row["before_bytes"] > MIB for row in written)


@linux
@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize("shard_state", [False, True])
def test_a_model_that_fits_only_in_slices(shard_state: bool) -> None:
    environ = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": hiding_path(*HIDDEN["torch"])}
    words = ["-np", "2", "--no-prefix-output", sys.executable, TESTS / "bench" / "limited_rank.py"]
    command = [CHOROSRUN, *words, str(PARAMETERS), str(shard_state), str(BUDGET)]
    done = subprocess.run(
        list(map(str, command)), env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    if shard_state:
        assert (done.returncode, done.stdout.split()) == (0, ["trained", "trained"]), done.stderr
    else:
        assert done.returncode != 0
        assert "can't allocate memory" in done.stderr
