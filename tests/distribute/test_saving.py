"""Files of a strategy's models; the cases are in ``saving_cases.py``."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import FRAMEWORKS, Job, check_case, needs, on
from ranks.environment import ONE_THREAD, QUICK, python_path

MODULE = "distribute.saving_cases"
SCRIPT = Path(__file__).with_name("killed_while_saving.py")


@on(*(Job(2, framework) for framework in ("tensorflow", "torch") if framework in FRAMEWORKS), cases=MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "framework"),
    [
        pytest.param("checkpoint of Horovod's face", "torch", marks=needs("torch")),
        pytest.param("SavedModel", "tensorflow", marks=needs("tensorflow")),
    ],
)
def test_a_process_that_is_killed_while_it_writes_leaves_the_last_complete_model(tmp_path, kind, framework):
    environ = {**os.environ, **QUICK, **ONE_THREAD, "KERAS_BACKEND": framework, "PYTHONPATH": python_path()}
    command = [sys.executable, SCRIPT, kind, tmp_path]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    trees = [
        {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
        for root in (tmp_path / "first", tmp_path / "model")
    ]
    finished = {name: data for name, data in trees[1].items() if not name.parts[0].startswith(".unfinished")}
    assert len(trees[0]) >= (1 if "checkpoint" in kind else 2)
    assert finished == trees[0]
