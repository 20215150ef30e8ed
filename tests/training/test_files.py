"""What a model saves is complete at any time, whatever kills the process that writes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import needs
from ranks.environment import ONE_THREAD, QUICK, python_path

SCRIPT = Path(__file__).with_name("killed_writers.py")


@pytest.mark.slow
@needs("torch")
def test_writers_that_are_killed_leave_the_last_complete_state_or_the_next(tmp_path: Path) -> None:
    environ = {**os.environ, **QUICK, **ONE_THREAD, "KERAS_BACKEND": "torch", "PYTHONPATH": python_path()}
    command = [sys.executable, SCRIPT, tmp_path, "4"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []
