"""Each example runs under ``chorosrun``, and its figures are plausible."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.example_jobs import Job

Start = Callable[..., Job]

FIGURES = {"example", "framework", "ranks", "epochs", "loss", "held_out_loss", "accuracy", "images_per_s"}


def figures_of(path: Path, example: str, framework: str, *, ranks: int = 2, epochs: int = 1) -> dict[str, Any]:
    """The figures in ``path``, after checking that they are plausible."""
    figures: dict[str, Any] = json.loads(path.read_text())
    assert figures.keys() >= FIGURES
    assert (figures["example"], figures["framework"]) == (example, framework)
    assert (figures["ranks"], figures["epochs"]) == (ranks, epochs)
    assert [row["epoch"] for row in figures["history"]] == list(range(1, epochs + 1))
    assert all(math.isfinite(row["loss"]) for row in figures["history"])
    assert 0 <= figures["accuracy"] <= 1
    assert figures["images_per_s"] > 0
    assert Path(figures["model"]).exists()
    return figures


def arguments(tmp_path: Path) -> tuple[object, ...]:
    return ("--save-dir", tmp_path / "models", "--json", tmp_path / "figures.json")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_mnist(start: Start, tmp_path: Path, framework: str) -> None:
    output = start("mnist_horovod", "--epochs", 1, "--limit", 64, *arguments(tmp_path), framework=framework).wait()
    figures_of(tmp_path / "figures.json", "mnist_horovod", framework)
    assert output.count("held-out accuracy") == 1, "only one rank prints"


def test_mnist_learns(start: Start, tmp_path: Path) -> None:
    start("mnist_horovod", "--epochs", 4, *arguments(tmp_path), framework="tensorflow").wait()
    figures = figures_of(tmp_path / "figures.json", "mnist_horovod", "tensorflow", epochs=4)
    assert figures["accuracy"] >= 0.95


def test_mnist_needs_no_launcher(start: Start, tmp_path: Path) -> None:
    start("mnist_horovod", "--epochs", 1, "--limit", 64, *arguments(tmp_path), framework="torch", ranks=1).wait()
    figures_of(tmp_path / "figures.json", "mnist_horovod", "torch", ranks=1)


def test_cifar10(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="the example reads TFRecords with TensorFlow")
    output = start("cifar10_horovod", "--epochs", 1, "--limit", 64, *arguments(tmp_path), framework="torch").wait()
    figures_of(tmp_path / "figures.json", "cifar10_horovod", "torch")
    assert output.count("Test accuracy") == 1, "only one rank prints"
    saved = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert saved == ["checkpoint-1.keras", "model.keras"]
