"""Keras on JAX with ``keras.distribution``: several processes, or several devices of one."""

from __future__ import annotations

import os
from typing import Any

import jax
import keras

from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.keras_training import compiled, fit_task


def join() -> Prepare:
    """Connects to the other processes, if the environment names any."""
    if "KERAS_DISTRIBUTION_JOB_ADDRESSES" in os.environ:
        keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        return fit_task(compiled(case.model), case, case.batch * jax.local_device_count())

    return prepare


if __name__ == "__main__":
    serve(join)
