"""Strategies whose replicas are devices of one process, with CPUs as the accelerators; and OneDeviceStrategy."""

import os
import subprocess
import sys

import pytest

from harness import FRAMEWORKS, Job, check_case, on, on_frameworks
from ranks.job import FAST_TO_COMPILE

MODULE = "distribute.device_cases"
ONE = "distribute.one_device_cases"

needs_jax = pytest.mark.skipif("jax" not in FRAMEWORKS, reason="needs JAX")


FLAGS = f"--xla_force_host_platform_device_count=4 {FAST_TO_COMPILE}"


@needs_jax
# Keras would look for TensorFlow as soon as it sees data, which takes seconds.
@on(Job(1, "jax", (("XLA_FLAGS", FLAGS),), hidden=("tensorflow",), name="devices-4"), cases=MODULE)
def test_four_devices(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


NOTEBOOK = """
import sys
import jax, jax.numpy as jnp
from choros import distribute

strategy = distribute.MirroredStrategy()
numbers = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
total = strategy.run(lambda x: distribute.get_replica_context().all_reduce("SUM", x), args=(numbers,))
assert strategy.num_replicas_in_sync == 4
assert [int(value) for value in total] == [6] * 4
assert "keras" not in sys.modules and "tensorflow" not in sys.modules
"""


@pytest.mark.slow
@needs_jax
def test_a_script_without_a_launcher_uses_all_devices_without_keras() -> None:
    environ = {**os.environ, "XLA_FLAGS": FLAGS}
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@on_frameworks(ONE)
def test_one_device(case: str, job: Job) -> None:
    """One rank would do, and each uses its own device alone; but these are up for other tests."""
    check_case(ONE, case, job)
