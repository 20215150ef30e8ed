"""The examples of ``choros.distribute`` run on each framework, and their figures are plausible."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from event_files import scalars
from examples.example_jobs import Job

Start = Callable[..., Job]


def argv(name: str, directory: Path, **options: object) -> list[object]:
    """Returns the command line of an example with its output in ``directory / name``."""
    options = {"save-dir": directory / name, "json": directory / f"{name}.json", "limit": 64, **options}
    return [name, *(text for option, value in options.items() for text in (f"--{option}", value))]


def figures_of(directory: Path, example: str, framework: str, epochs: list[int]) -> dict[str, Any]:
    """The figures that an example wrote, after checking that they are plausible."""
    figures: dict[str, Any] = json.loads((directory / f"{example}.json").read_text())
    assert (figures["example"], figures["framework"]) == (example, framework)
    assert [row["epoch"] for row in figures["history"]] == epochs
    assert all(math.isfinite(row["loss"]) for row in figures["history"])
    assert 0 <= figures["accuracy"] <= 1
    assert figures["images_per_s"] > 0
    assert Path(figures["model"]).exists()
    return figures


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax"])
def test_mirrored(start: Start, tmp_path: Path, framework: str) -> None:
    commands = [
        argv("mnist_mirrored", tmp_path, epochs=1, **{"batch-size": 16}),
        argv("fashion_mnist_custom_loop", tmp_path, epochs=2, **{"batch-size": 16}),
    ]
    if framework == "torch":  # The other frameworks would run the same code.
        commands += [argv("multi_worker", tmp_path, epochs=epochs) for epochs in (1, 3)]
    output = start("several", *(text for command in commands for text in ("---", *command)), framework=framework).wait()

    figures = figures_of(tmp_path, "mnist_mirrored", framework, [1])
    assert (figures["ranks"], figures["replicas"]) == (2, 2)
    assert output.count("Learning rate for epoch 1 is 1e-03") == 1, "only one rank prints"
    assert ("exported as" in output) == (framework == "tensorflow")
    logs = tmp_path / "mnist_mirrored" / "logs"
    (row,) = figures["history"]
    (trained,), (held_out,) = (list((logs / name).iterdir()) for name in ("train", "validation"))
    assert scalars(trained)["epoch_loss"] == [(0, pytest.approx(row["loss"]))]
    assert scalars(held_out)["epoch_accuracy"] == [(0, pytest.approx(row["val_accuracy"]))]

    figures = figures_of(tmp_path, "fashion_mnist_custom_loop", framework, [1, 2])
    assert figures["restored_accuracy"] == pytest.approx(figures["history"][0]["test_accuracy"])

    if framework == "torch":
        figures_of(tmp_path, "multi_worker", framework, [2, 3])
        assert "trained epochs 2 to 3 on 2 worker(s)" in output


@pytest.mark.timeout(300)
def test_parameter_server(start: Start, tmp_path: Path) -> None:
    command = [*argv("parameter_server", tmp_path, epochs=2), "--coordinator"]
    output = start("several", *command, framework="torch", ranks=1, servers=1).wait()
    figures = figures_of(tmp_path, "parameter_server", "torch", [1, 2])
    assert (figures["ranks"], figures["servers"]) == (1, 1)
    assert output.count("held-out accuracy") == 1, "only the chief prints"
