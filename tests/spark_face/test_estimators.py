"""``KerasEstimator`` and ``TorchEstimator``: as plain training on the same rows in the same order."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from harness import TESTS, needs

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), needs("torch")]


@pytest.mark.parametrize("which", ["keras", "torch"])
def test_an_estimator_trains_as_one_process_does(which, tmp_path):
    command = [sys.executable, TESTS / "spark_face" / "estimators_script.py", which, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-5, found
    assert found["predictions"] < 1e-5, found
    assert found["two outputs"] < 1e-5, found
    assert found["validation"] < 1e-4, found
    assert found["losses"][-1] < found["losses"][0]
    assert found["left"] == [], found
    assert np.isfinite(found["losses"]).all()
