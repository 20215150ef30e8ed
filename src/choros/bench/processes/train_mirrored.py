"""``tf.distribute.MirroredStrategy`` and Keras' ``fit``, on as many logical CPUs as the command line says."""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

from choros.bench.channel import Prepare, Task, serve
from choros.bench.processes.keras_training import compiled, fit_task


def join() -> Prepare:
    """Divides the CPU into logical devices."""
    devices = int(sys.argv[1])
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(devices)])

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        with strategy.scope():
            model = compiled(case.model)
        return fit_task(model, case, case.batch * devices)

    return prepare


if __name__ == "__main__":
    serve(join)
