"""Scripts of processes that have not initialised their framework yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import CHOROSRUN, FRAMEWORKS

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
if "cpu" not in device:
    assert device.endswith(f":{{hvd.local_rank()}}"), device
try:
    hvd.shutdown()
    hvd.DistributedOptimizer("adam")
except ValueError as error:
    assert "call init() once" in str(error)
else:
    raise AssertionError("an optimizer before init")
print("pinned", device)
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_pin_device_and_an_optimizer_before_init(framework: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PIN.format(framework=framework))
    environ = {**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [CHOROSRUN, "-np", "2", sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pinned") == 2
