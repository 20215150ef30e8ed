"""Training over a link of 100 Mbit/s and 5 ms between two hosts; benchmarks/slow_link measures the time."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness import ROOT, TESTS, case_names

MODULE = "parallel.slow_link_cases"
LINK = str(ROOT / "benchmarks" / "slow_link" / "link.py")
CANNOT = 75


@functools.cache
def errors() -> dict[str, str]:
    """Runs all cases; returns the error of each, empty if it passed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, LINK, "--", sys.executable, str(TESTS / "harness.py"), MODULE, str(report)]
        environ = {**os.environ, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, env=environ, cwd=directory, capture_output=True, text=True, timeout=100)
        if done.returncode == CANNOT:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(report.read_text())


@pytest.mark.parametrize("case", case_names(MODULE))
def test_two_hosts(case: str) -> None:
    assert not errors()[case], errors()[case]
