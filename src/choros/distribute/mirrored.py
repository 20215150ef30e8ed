"""MirroredStrategy: the replicas of one host."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from choros.distribute.joining import framework, join
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.replicas import Replicas
from choros.distribute.strategy import Strategy
from choros.errors import ConfigError, StrategyError
from choros.topology import Topology

if TYPE_CHECKING:
    from choros.distribute.fit import Training

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(Strategy):
    """Synchronous training on one host: every replica has a copy of the variables, and all are updated alike.

    Under ``chorosrun -np N`` each of the N processes is a replica, with its own device. On JAX a process that was
    started alone, such as a notebook, uses all its devices.

    Args:
        devices: which devices of a lone process on JAX to use, such as ``["gpu:0", "gpu:1"]``; ``None`` for all. Under
            ``chorosrun`` there is one a process, and this can only say how many.
        cross_device_ops: ``tf.distribute``'s; the engine decides how to reduce.

    Raises:
        ConfigError: there are not so many devices, or processes.
        StrategyError: the job has several hosts.

    Example:
        >>> from choros import distribute
        >>> strategy = distribute.MirroredStrategy()
        >>> with strategy.scope():
        ...     pass  # model = …; model.compile(…)
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:
        del cross_device_ops
        place = join()
        if place.cross_size > 1:
            raise StrategyError(
                f"MirroredStrategy is for the replicas of one host, and this job runs on {place.cross_size}: use "
                "MultiWorkerMirroredStrategy, which is for any number."
            )
        replicas, training = replicas_of(place, devices)
        super().__init__(replicas)
        self._training = training

    @property
    def training(self) -> Training | None:
        """Synchronous."""
        return self._training


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


def synchronous_training(place: Topology, *, central: bool = False) -> Training | None:
    """How the processes of a job train Keras models together; ``None`` where there is no Keras.

    Args:
        place: this process's.
        central: one process keeps the optimizer's state.
    """
    if "keras" not in sys.modules:
        return None
    from choros.distribute.fit.central_storage import CentralCombiner
    from choros.distribute.fit.gradients import ReplicaCombiner
    from choros.distribute.fit.synchronous import SynchronousTraining

    combiner = CentralCombiner if central else ReplicaCombiner
    return SynchronousTraining(ProcessReplicas(place.size, place.rank), combiner)
