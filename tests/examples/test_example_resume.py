"""A training that was killed with ``kill -9`` resumes with the losses of an uninterrupted run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.example_jobs import Job

JOB = ("unet_horovod", "--epochs", 3, "--limit", 101)


def wait_for(path: Path, job: Job) -> None:
    while not path.exists():
        assert job.launcher.poll() is None, job.launcher.communicate()[0]
        time.sleep(0.01)


def losses(path: Path) -> dict[int, tuple[float, float]]:
    """Training and validation loss of each epoch."""
    return {row["epoch"]: (row["loss"], row["val_loss"]) for row in json.loads(path.read_text())["history"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("framework", "resume"), [("tensorflow", ()), ("torch", ("--resume-from-epoch", 1))], ids=["auto", "explicit"]
)
def test_losses_equal_those_of_an_uninterrupted_run(
    start: Callable[..., Job],
    tmp_path: Path,
    framework: str,
    resume: tuple[object, ...],
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start(*JOB, "--save-dir", whole, "--json", whole / "figures.json", framework=framework).wait()

    job = start(*JOB, "--save-dir", broken, framework=framework)
    wait_for(broken / "checkpoint-1.keras", job)
    job.kill()
    assert not (broken / "checkpoint-3.keras").exists(), "the job was killed too late to prove anything"

    start(*JOB, "--save-dir", broken, "--json", broken / "figures.json", *resume, framework=framework).wait()
    expected, resumed = losses(whole / "figures.json"), losses(broken / "figures.json")
    assert list(resumed) in ([2, 3], [3])
    for epoch, pair in resumed.items():
        assert pair == pytest.approx(expected[epoch], rel=1e-5)
    assert (broken / "unet.keras").exists()
