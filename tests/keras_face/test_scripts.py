"""Scripts of processes that have not initialised their framework yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import FRAMEWORKS

pytestmark = pytest.mark.slow

PIN = """
import choros.keras as hvd
hvd.init()
device = hvd.pin_device(intra_op_threads=1, inter_op_threads=2)
if {framework!r} == "tensorflow":
    import tensorflow as tf
    threads = tf.config.threading
    assert threads.get_intra_op_parallelism_threads() == 1
    assert threads.get_inter_op_parallelism_threads() == 2
elif {framework!r} == "torch":
    import torch
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == (1, 2)
assert device == "cpu" or device.endswith(":0"), device
print("pinned", device)
"""


@pytest.mark.parametrize(
    "framework", [framework for framework in FRAMEWORKS if framework != "jax"]
)  # has no such pools
def test_pin_device_sets_threads(framework: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PIN.format(framework=framework))
    environ = {**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "pinned" in done.stdout
