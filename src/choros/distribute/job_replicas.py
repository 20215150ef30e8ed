"""The replicas of the job that this process has joined, their training of Keras models, and their cluster."""

from __future__ import annotations

import functools
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from choros.distribute.cluster_resolver import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from choros.distribute.fit.training import Training
from choros.distribute.joining import framework
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.replicas import Replicas
from choros.errors import ConfigError
from choros.parallel.objects import allgather_object
from choros.topology import Topology

__all__ = ["cluster_of", "replicas_of", "synchronous_training"]

#: The port of a host's first worker in tf.distribute's documentation.
_PORT = 2222

_log = logging.getLogger("choros")


def replicas_of(topology: Topology, devices: Sequence[str] | None = None) -> tuple[Replicas, Training | None]:
    """Returns the replicas of this job, and their training of Keras models, which is ``None`` without Keras.

    The replicas are the processes of the job; on JAX, a process that was started alone has one per device.
    """
    if topology.size == 1 and framework() == "jax":
        from choros.distribute.devices.replicas import local_devices, on_devices

        chosen = local_devices(devices)
        if len(chosen) > 1:
            return on_devices(chosen)
    if devices is not None and len(devices) != topology.size:
        raise ConfigError(
            f"devices={list(devices)!r} requests {len(devices)} replicas, but this job has {topology.size}: one per "
            f"process. Start the script with chorosrun -np {len(devices)}, or leave devices out."
        )
    if topology.size == 1 and topology.launcher == Topology().launcher:
        _warn_of_one_replica()
    return ProcessReplicas(), synchronous_training()


@functools.cache
def _warn_of_one_replica() -> None:
    """Says once how a script gets more replicas."""
    _log.warning(
        "this process, which was started alone, is the only replica. For N replicas, start the script with: "
        "chorosrun -np N python %s",
        Path(sys.argv[0]).name or "train.py",
    )


def synchronous_training(state_owner: int | None = None) -> Training | None:
    """Returns the synchronous training of Keras models by the processes of the job; ``None`` without Keras.

    Args:
        state_owner: the only process that keeps the optimizers' state and applies updates; ``None``: all processes do.
    """
    if "keras" not in sys.modules:
        return None
    from choros.distribute.fit.synchronous import SynchronousTraining

    return SynchronousTraining(ProcessReplicas(), state_owner)


def cluster_of(topology: Topology) -> ClusterResolver:
    """Returns the resolver of this job's cluster: ``TF_CONFIG``'s, or one worker for each rank that a launcher started.

    So a script's ``task_type == "worker" and task_id == 0`` is true on one rank, whatever has started it. In a job
    without ``TF_CONFIG`` nothing listens at the addresses.
    """
    resolver = TFConfigClusterResolver()
    if topology.size == 1 or resolver.task_type is not None:
        return resolver
    places = allgather_object((socket.gethostname(), topology.local_rank), name="cluster")
    workers = [f"{host}:{_PORT + local_rank}" for host, local_rank in places]
    return SimpleClusterResolver({"worker": workers}, task_type="worker", task_id=topology.rank)
