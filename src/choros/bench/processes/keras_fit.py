"""Keras' ``fit``: by choros, plain, with ``keras.distribution`` and with ``tf.distribute.MirroredStrategy``."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import keras

from choros.bench.channel import Prepare, Task, serve_one_of
from choros.bench.processes.models import compiled, fit_task


def choros(shard_state: str = "") -> Prepare:
    """Trains on the ranks of the job, with the distributed optimizer and choros' callbacks."""
    import choros.keras as hvd

    distributed = partial(hvd.DistributedOptimizer, shard_state=bool(shard_state))
    hvd.init()
    hvd.pin_device()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        model = compiled(case.model, distributed)
        # Weights are broadcast once per training, which consists of many calls of fit here.
        fit_task(model, case, case.batch, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]).run(1)
        return fit_task(model, case, case.batch, [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.Throughput()])

    return prepare


def plain() -> Prepare:
    """Trains in each process independently."""

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        return fit_task(compiled(case.model), case, case.batch)

    return prepare


def distribution() -> Prepare:
    """Trains on JAX on several processes, if the environment names any, or on several devices of one."""
    import jax

    if "KERAS_DISTRIBUTION_JOB_ADDRESSES" in os.environ:
        keras.distribution.initialize()

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()  # also of the distribution
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
        model = compiled(case.model)

        def check() -> None:
            devices = len(model.trainable_variables[0].value.sharding.device_set)
            if devices != jax.device_count():
                raise RuntimeError(f"the model is on {devices} of {jax.device_count()} devices")

        return replace(fit_task(model, case, case.batch * jax.local_device_count()), check=check)

    return prepare


def mirrored(devices: str) -> Prepare:
    """Trains on logical devices into which it divides the CPU."""
    import tensorflow as tf

    number = int(devices)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(number)])

    def prepare(case: Any) -> Task:
        keras.utils.clear_session()
        with strategy.scope():
            model = compiled(case.model)
        return fit_task(model, case, case.batch * number)

    return prepare


if __name__ == "__main__":
    serve_one_of(choros, plain, distribution, mirrored)
