"""The job that this process joins: its initialisation, its replicas, their training of Keras models, its cluster; and
the devices of this process.
"""

import functools
import logging
import os
import random
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from choros.comm import global_process_set, has_others, init, is_initialized, topology
from choros.distribute.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    tf_config_of,
)
from choros.distribute.replicas import ProcessReplicas, Replicas
from choros.distribute.training import Training
from choros.errors import ConfigError
from choros.frameworks import FRAMEWORKS, is_installed, missing_backend
from choros.parallel.objects import allgather_object, object_of_first
from choros.settings import current
from choros.topology import TF_CONFIG, Topology
from choros.topology.environments import RANK_LAUNCHERS

#: The port of a host's first worker in tf.distribute's documentation.
_PORT = 2222

_log = logging.getLogger("choros")


def framework() -> str:
    """Returns Keras' backend, or the imported framework; with none, imports Keras so that models are patched."""
    loaded = [name for name in FRAMEWORKS if sys.modules.get(name) is not None]
    if "keras" in sys.modules or (not loaded and is_installed("keras")):
        try:
            import keras
        except ImportError as error:
            raise ConfigError(missing_backend(error)) from None
        backend = str(keras.backend.backend())
        if backend not in FRAMEWORKS:
            raise ConfigError(
                f"Keras' backend is {backend}, which cannot train: set KERAS_BACKEND to {' or '.join(FRAMEWORKS)}."
            )
        return backend
    if loaded:
        return loaded[0]
    raise ConfigError(
        "a strategy needs a framework to train with: import torch, jax or tensorflow first, or install "
        "Keras: pip install 'choros[tensorflow]', 'choros[torch]' or 'choros[jax]'."
    )


def join(cluster_resolver: Any = None) -> Topology:
    """Joins the job in which this process was started; pins its device, and lets all processes draw the same numbers of
    ``random`` and ``numpy.random``, which split and shuffle data; so does ``tf.data``, if the program has set no seed.
    """
    if (
        cluster_resolver is not None
        and not is_initialized()
        and all(environment.read(os.environ) is None for environment in RANK_LAUNCHERS)
    ):
        os.environ[TF_CONFIG] = tf_config_of(cluster_resolver)
    init()
    job = topology()
    framework()
    if job.size == 1 and not current().elastic:
        return job
    if "keras" in sys.modules:
        from choros.training.device import pin_device

        pin_device()
    _share_random_streams()
    return job


def _share_random_streams() -> None:
    states = object_of_first(lambda: (random.getstate(), np.random.get_state(legacy=False)))
    random.setstate(states[0])
    np.random.set_state(states[1])
    if sys.modules.get("tensorflow") is not None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        if context.global_seed() is None:
            copied = np.random.RandomState()  # drawing from the stream itself would change what the program draws
            copied.set_state(states[1])
            tf.random.set_seed(copied.randint(2**31))


def replicas_of(
    topology: Topology, devices: Sequence[str] | None = None, shard_state: bool | None = None
) -> tuple[Replicas, Training | None]:
    """Returns this job's replicas, processes or, alone on JAX, devices, and their Keras training, if there is Keras."""
    if not has_others(global_process_set) and framework() == "jax":
        chosen = local_devices(devices)
        if len(chosen) > 1:
            if shard_state:
                raise ConfigError(
                    f"shard_state=True divides the optimizer's state among processes, and this one has all "
                    f"{len(chosen)} devices: start a process for each, with chorosrun -np {len(chosen)}."
                )
            return on_devices(chosen)
    check_number("devices", devices, topology)
    if topology.size == 1 and topology.launcher == Topology().launcher:
        _warn_of_one_replica()
    return on_processes(shard_state=shard_state)


def check_number(argument: str, devices: Sequence[str] | None, topology: Topology) -> None:
    """Raises a ConfigError if ``devices``, an ``argument`` of which only the number counts, are not one per process."""
    if devices is not None and len(devices) != topology.size:
        advice = f"Start the script with chorosrun -np {len(devices)}, or leave" if devices else "Leave"
        raise ConfigError(
            f"{argument}={list(devices)!r} requests {len(devices)} replicas, but this job has {topology.size}: one per "
            f"process. {advice} {argument} out."
        )


@functools.cache
def _warn_of_one_replica() -> None:
    """Says once how a script gets more replicas."""
    _log.warning(
        "this process, which was started alone, is the only replica. For N replicas, start the script with: "
        "chorosrun -np N python %s",
        Path(sys.argv[0]).name or "train.py",
    )


def on_processes(state_owner: int | None = None, shard_state: bool | None = None) -> tuple[Replicas, Training | None]:
    """Returns the job's processes, and their synchronous training of Keras models (``None`` without Keras)."""
    replicas = ProcessReplicas()
    if "keras" not in sys.modules:
        return replicas, None
    from choros.distribute.synchronous import SynchronousTraining

    return replicas, SynchronousTraining(replicas, state_owner, shard_state)


def on_devices(devices: Sequence[Any]) -> tuple[Replicas, Training | None]:
    """Returns the replicas on several devices of this process, and their training (``None`` without Keras)."""
    from choros.distribute.device_replicas import DeviceReplicas

    replicas = DeviceReplicas(devices)
    if "keras" not in sys.modules:
        return replicas, None
    from choros.distribute.device_training import DeviceTraining

    return replicas, DeviceTraining(replicas, devices)


def on_one_device(device: str) -> tuple[Replicas, Training]:
    """Returns one replica on a device of this process, and its training; ConfigError if there is no such device."""
    used, name = framework(), device_name(device)
    known = _devices_of(used)
    if name not in known:
        raise ConfigError(f"OneDeviceStrategy({device!r}): {used} has no such device. It has {', '.join(known)}.")
    return ProcessReplicas(alone=True, on_device=functools.partial(_on_device, used, name)), Training()


def cluster_of(topology: Topology) -> ClusterResolver:
    """Returns ``TF_CONFIG``'s cluster, else one worker per rank, so that one rank is worker 0, whatever started it;
    without ``TF_CONFIG`` nothing listens at the addresses.
    """
    resolver = TFConfigClusterResolver()
    if topology.size == 1 or resolver.task_type is not None:
        return resolver
    places = allgather_object((socket.gethostname(), topology.local_rank), name="cluster")
    workers = [f"{host}:{_PORT + local_rank}" for host, local_rank in places]
    return SimpleClusterResolver({"worker": workers}, task_type="worker", task_id=topology.rank)


# Devices, named in TensorFlow's notation on every framework.

_NAME = re.compile(r"(?:/?(?:job|replica|task):\w+)*/?(?:device:)?([a-z]+)(?::(\d+))?", re.IGNORECASE)


def device_name(name: str) -> str:
    """Returns TensorFlow's name of a device of this process as its kind and its index; ConfigError if it is none.

    >>> [device_name(name) for name in ("cpu", "/gpu:1", "/job:localhost/replica:0/task:0/device:GPU:0")]
    ['cpu:0', 'gpu:1', 'gpu:0']
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(f"{name!r} is not a device name: write 'cpu', '/gpu:0' or 'GPU:1'.")
    kind = match[1].lower()
    return f"{'gpu' if kind == 'cuda' else kind}:{int(match[2] or 0)}"


def _devices_of(framework: str) -> list[str]:
    """Returns the names of this process's devices that ``framework`` can use; this initialises the framework."""
    match framework:
        case "tensorflow":
            import tensorflow as tf

            return [device_name(device.name) for device in tf.config.list_logical_devices()]
        case "torch":
            import torch

            count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
            return ["cpu:0", *(f"gpu:{index}" for index in range(count))]
        case _:
            return list(_jax_devices())


def _jax_devices() -> dict[str, Any]:
    """Returns JAX's devices of this process by their names, those of the default platform first."""
    import jax

    return {
        f"{platform}:{index}": device
        for platform in dict.fromkeys((jax.default_backend(), "cpu"))
        for index, device in enumerate(jax.local_devices(backend=platform))
    }


def _on_device(framework: str, device: str) -> Any:
    """Returns the block in which ``framework``, and Keras on it, creates and computes values on ``device``."""
    match framework:
        case "tensorflow":
            import tensorflow as tf

            return tf.device(f"/device:{device.upper()}")
        case "torch":
            import torch

            kind, _, index = device.partition(":")
            name = kind if kind == "cpu" else f"{torch.accelerator.current_accelerator().type}:{index}"
            if "keras" not in sys.modules:
                return torch.device(name)
            # Not torch.device: a DataLoader that shuffles would draw its random numbers on the accelerator, and fail.
            import keras

            return keras.device(name)
        case _:
            import jax

            return jax.default_device(_jax_devices()[device])


def local_devices(names: Sequence[str] | None = None) -> list[Any]:
    """Returns JAX's devices of these names, by default all of its platform; ConfigError if absent or twice."""
    if names is None:
        import jax

        return list(jax.local_devices())
    known = _jax_devices()
    wanted = [device_name(name) for name in names]
    if len(set(wanted)) < len(wanted) or not known.keys() >= set(wanted):
        raise ConfigError(f"devices={list(names)!r}: choose from {', '.join(known)}, each once.")
    return [known[name] for name in wanted]
