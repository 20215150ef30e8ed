"""MirroredStrategy: the replicas of one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from choros.distribute.fit.training import Training
from choros.distribute.job_replicas import replicas_of
from choros.distribute.joining import join
from choros.distribute.strategy import Strategy
from choros.errors import StrategyError

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(Strategy):
    """Synchronous training on one host: every replica has a copy of the variables and applies the same updates.

    Under ``chorosrun -np N`` each of the N processes is a replica, with its own device. On JAX a process that was
    started alone, such as a notebook, uses all its devices.

    Args:
        devices: the devices to use in a process that was started alone on JAX, such as ``["gpu:0", "gpu:1"]``; ``None``
            for all. Under ``chorosrun`` each process has one device, and only the number of devices counts.
        cross_device_ops: has no effect; the engine decides how to reduce.

    Raises:
        ConfigError: a device does not exist, or the number of processes differs.
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
        topology = join()
        if topology.cross_size > 1:
            raise StrategyError(
                f"MirroredStrategy is for the replicas of one host, and this job runs on {topology.cross_size}: use "
                "MultiWorkerMirroredStrategy, which is for any number of hosts."
            )
        replicas, training = replicas_of(topology, devices)
        super().__init__(replicas)
        self._training = training

    @property
    def training(self) -> Training | None:
        """Synchronous."""
        return self._training
