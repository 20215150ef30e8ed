"""A training that was killed with ``kill -9`` resumes with the losses of an uninterrupted run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.example_jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.program]

JOB = ("unet_horovod", "--epochs", 3, "--limit", 53)


def wait_for(path: Path, job: Job) -> None:
    while not path.exists():
        assert job.launcher.poll() is None, job.launcher.communicate()[0]
        time.sleep(0.01)


def losses(path: Path) -> dict[int, tuple[float, float]]:
    """Training and validation loss of each epoch."""
    return {row["epoch"]: (row["loss"], row["val_loss"]) for row in json.loads(path.read_text())["history"]}


def test_losses_equal_those_of_an_uninterrupted_run(start: Callable[..., Job], tmp_path: Path) -> None:
    whole, broken, explicit = (tmp_path / name for name in ("whole", "broken", "explicit"))
    job = start("several", *JOB, "--save-dir", broken, framework="torch")
    wait_for(broken / "checkpoint-1.keras", job)
    job.kill()
    assert not (broken / "checkpoint-3.keras").exists(), "the job was killed too late to prove anything"
    shutil.copytree(broken, explicit)

    start(
        "several",
        *(*JOB, "--save-dir", broken, "--json", broken / "figures.json"),
        *("---", *JOB, "--save-dir", explicit, "--json", explicit / "figures.json", "--resume-from-epoch", 1),
        *("---", *JOB, "--save-dir", whole, "--json", whole / "figures.json"),
        framework="torch",
    ).wait()
    expected = losses(whole / "figures.json")
    for directory, epochs in ((broken, ([2, 3], [3])), (explicit, ([2, 3],))):
        resumed = losses(directory / "figures.json")
        assert list(resumed) in epochs
        for epoch, pair in resumed.items():
            assert pair == pytest.approx(expected[epoch], rel=1e-5)
        assert (directory / "unet.keras").exists()
