"""The replicas of the job that this process has joined, and how they train Keras models together."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from choros.distribute.fit.training import Training
from choros.distribute.joining import framework
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.replicas import Replicas
from choros.errors import ConfigError
from choros.topology import Topology

__all__ = ["replicas_of", "synchronous_training"]


def replicas_of(place: Topology, devices: Sequence[str] | None = None) -> tuple[Replicas, Training | None]:
    """The replicas of this job, and how they train Keras models: processes, or the devices of a lone one on JAX.

    The second is ``None`` where there is no Keras.
    """
    if place.size == 1 and framework() == "jax":
        from choros.distribute.devices.replicas import local_devices, on_devices

        chosen = local_devices(devices)
        if len(chosen) > 1:
            return on_devices(chosen)
    if devices is not None and len(devices) != place.size:
        raise ConfigError(
            f"devices={list(devices)!r} asks for {len(devices)} replicas, but this job has {place.size}: each process "
            f"has one device. Start the script with chorosrun -np {len(devices)}, or leave devices out."
        )
    return ProcessReplicas(place.size, place.rank), synchronous_training(place)


def synchronous_training(place: Topology, state_owner: int | None = None) -> Training | None:
    """How the processes of a job train Keras models together; ``None`` where there is no Keras.

    Args:
        place: this process's.
        state_owner: the process that alone keeps the state of optimizers and makes updates; ``None``: every one does.
    """
    if "keras" not in sys.modules:
        return None
    from choros.distribute.fit.synchronous import SynchronousTraining

    return SynchronousTraining(ProcessReplicas(place.size, place.rank), state_owner)
