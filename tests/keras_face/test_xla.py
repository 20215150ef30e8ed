"""The xla engine on real processes, CPUs standing for accelerators; the cases are in ``xla_cases.py``."""

import os
import subprocess
import sys

import pytest

from harness import CHOROSRUN, FRAMEWORKS, Job, check_case, on
from ranks.job import FAST_TO_COMPILE

MODULE = "keras_face.xla_cases"
TRANSPARENCY = "case_twenty_steps_are_those_of_one_device"
ENGINE = {"CHOROS_ENGINE": "xla", "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}

pytestmark = pytest.mark.skipif("jax" not in FRAMEWORKS, reason="needs JAX")


def xla(ranks: int, devices: int) -> Job:
    """Ranks with ``devices`` each. TensorFlow is hidden: Keras would import it as soon as it is given data."""
    flags = f"--xla_force_host_platform_device_count={devices} {FAST_TO_COMPILE}"
    environ = (("CHOROS_ENGINE", "xla"), ("XLA_FLAGS", flags))
    return Job(ranks, "jax", environ, hidden=("tensorflow",), name=f"xla-{devices}")


@on(xla(2, 2), cases=MODULE)
def test_two_processes_with_two_devices(case: str, job: Job) -> None:
    check_case(MODULE, case, job)


@pytest.mark.nightly
@on(xla(2, 1))
def test_one_device_each(job: Job) -> None:
    check_case(MODULE, TRANSPARENCY, job)


KILLED = """
import os, signal, sys
sys.modules["tensorflow"] = None
import numpy as np
import choros.keras as hvd
hvd.init()
import keras

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if hvd.rank() == 1 and batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)

model = keras.Sequential([keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Kill()]
model.fit(np.zeros((40, 2)), np.zeros((40, 1)), batch_size=2, verbose=0, callbacks=callbacks)
"""

TOO_LATE = """
import os, jax, choros
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    jax.devices()
choros.init()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [CHOROSRUN, "-np", "2", sys.executable, "-c", program]
    return subprocess.run(command, env={**os.environ, **ENGINE}, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job() -> None:
    done = run(KILLED)
    assert done.returncode == 128 + 9
    assert "rank 1" in done.stderr


@pytest.mark.slow
def test_init_after_jax_has_initialised_its_devices() -> None:
    done = run(TOO_LATE)
    assert done.returncode != 0
    assert "call init() first" in done.stderr
