"""The examples run, most of them several per job, and report plausible figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from event_files import scalars
from examples.example_jobs import Job
from harness import needs

pytestmark = pytest.mark.slow

Start = Callable[..., Job]

HOROVOD_FIGURES = {"example", "framework", "ranks", "epochs", "loss", "held_out_loss", "accuracy", "images_per_s"}


def argv(name: str, directory: Path, **options: object) -> list[object]:
    """The arguments of an example that writes its files to ``directory / name``."""
    options = {"save-dir": directory / name, "json": directory / f"{name}.json", **options}
    return [name, *(word for option, value in options.items() for word in (f"--{option}", value))]


def figures_of(directory: Path, example: str, framework: str, epochs: list[int], ranks: int = 2) -> dict[str, Any]:
    """Returns the figures that an example wrote, after checking that they are plausible."""
    figures: dict[str, Any] = json.loads((directory / f"{example}.json").read_text())
    if example.endswith("_horovod"):
        assert figures.keys() >= HOROVOD_FIGURES
        assert figures["epochs"] == epochs[-1]
    assert (figures["example"], figures["framework"], figures["ranks"]) == (example, framework, ranks)
    assert [row["epoch"] for row in figures["history"]] == epochs
    assert all(math.isfinite(row["loss"]) for row in figures["history"])
    assert 0 <= figures["accuracy"] <= 1
    assert figures["images_per_s"] > 0
    assert Path(figures["model"]).exists()
    return figures


# ── several in a job ─────────────────────────────────────────────────────────────────────────────


def check_mnist_mirrored(directory: Path, framework: str, output: str) -> None:
    figures = figures_of(directory, "mnist_mirrored", framework, [1])
    assert figures["replicas"] == 2
    assert output.count("Learning rate for epoch 1 is 1e-03") == 1, "only one rank prints"
    assert ("exported as" in output) == (framework == "tensorflow")
    logs = directory / "mnist_mirrored" / "logs"
    (row,) = figures["history"]
    (trained,), (held_out,) = (list((logs / name).iterdir()) for name in ("train", "validation"))
    assert scalars(trained)["epoch_loss"] == [(0, pytest.approx(row["loss"]))]
    assert scalars(held_out)["epoch_accuracy"] == [(0, pytest.approx(row["val_accuracy"]))]


def check_custom_loop(directory: Path, framework: str, output: str) -> None:
    figures = figures_of(directory, "fashion_mnist_custom_loop", framework, [1, 2])
    assert figures["restored_accuracy"] == pytest.approx(figures["history"][0]["test_accuracy"])


def check_multi_worker(directory: Path, framework: str, output: str) -> None:
    figures_of(directory, "multi_worker", framework, [2, 3])
    assert "trained epochs 2 to 3 on 2 worker(s)" in output


def check_mnist_horovod(directory: Path, framework: str, output: str) -> None:
    figures = figures_of(directory, "mnist_horovod", framework, [1, 2, 3, 4] if framework == LEARNS else [1])
    if framework == LEARNS:
        assert figures["accuracy"] >= 0.95
    assert output.count(f"model saved as {directory / 'mnist_horovod'}") == 1, "only one rank prints"


def check_cifar10(directory: Path, framework: str, output: str) -> None:
    figures_of(directory, "cifar10_horovod", framework, [1])
    assert output.count("Test accuracy") == 1, "only one rank prints"
    saved = sorted(path.name for path in (directory / "cifar10_horovod").iterdir())
    assert saved == ["checkpoint-1.keras", "model.keras"]


#: The framework on which an example learns the digits, all of them; the other runs are of a few examples.
LEARNS = "tensorflow"

#: The runs of each example, and the check of their results.
EXAMPLES: dict[str, tuple[list[dict[str, object]], Callable[[Path, str, str], None]]] = {
    "mnist_mirrored": ([{"epochs": 1, "batch-size": 16}], check_mnist_mirrored),
    "fashion_mnist_custom_loop": ([{"epochs": 2, "batch-size": 16}], check_custom_loop),
    "multi_worker": ([{"epochs": 1}, {"epochs": 3}], check_multi_worker),
    "mnist_horovod": ([{"epochs": 1}], check_mnist_horovod),
    "cifar10_horovod": ([{"epochs": 1}], check_cifar10),
}


@pytest.mark.program
@pytest.mark.parametrize(
    ("framework", "names"),
    [  # Each on the frameworks for which it has specific code; those that give each rank another seed are last.
        ("tensorflow", ("mnist_mirrored", "fashion_mnist_custom_loop", "mnist_horovod", "cifar10_horovod")),
        ("torch", ("mnist_mirrored", "fashion_mnist_custom_loop", "multi_worker", "mnist_horovod")),
        ("jax", ("fashion_mnist_custom_loop", "mnist_horovod")),
    ],
)
def test_one_job(start: Start, tmp_path: Path, framework: str, names: tuple[str, ...]) -> None:
    command: list[object] = []
    for name in names:
        for options in EXAMPLES[name][0]:
            size = {"epochs": 4} if (name, framework) == ("mnist_horovod", LEARNS) else {"limit": 64}
            command += ["---", *argv(name, tmp_path, **{**options, **size})]
    output = start("several", *command, framework=framework).wait()
    for name in names:
        EXAMPLES[name][1](tmp_path, framework, output)


# ── one each ─────────────────────────────────────────────────────────────────────────────────────


@needs("keras_hub")
@pytest.mark.program
@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax"])
def test_lora(start: Start, tmp_path: Path, framework: str) -> None:
    output = start(*argv("kerashub_lora", tmp_path, epochs=2, limit=64), framework=framework).wait()
    figures = json.loads((tmp_path / "kerashub_lora.json").read_text())
    assert (figures["framework"], figures["ranks"]) == (framework, 2)
    assert 0 < figures["trained"] < figures["frozen"] / 10
    assert figures["history"][1]["loss"] < figures["history"][0]["loss"]
    assert output.count("LoRA's weights saved") == 1, "only one rank prints"
    assert Path(figures["model"]).exists()


def test_mnist_needs_no_launcher(start: Start, tmp_path: Path) -> None:
    start(*argv("mnist_horovod", tmp_path, epochs=1, limit=64), framework="torch", ranks=1).wait()
    figures_of(tmp_path, "mnist_horovod", "torch", [1], ranks=1)


@pytest.mark.nightly
def test_parameter_server(start: Start, tmp_path: Path) -> None:
    command = [*argv("parameter_server", tmp_path, epochs=2, limit=64), "--coordinator"]
    output = start("several", *command, framework="torch", ranks=1, servers=1).wait()
    figures = figures_of(tmp_path, "parameter_server", "torch", [1, 2], ranks=1)
    assert figures["servers"] == 1
    assert output.count("held-out accuracy") == 1, "only the chief prints"
