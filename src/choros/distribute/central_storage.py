"""CentralStorageStrategy: the optimizer's state, and the variables it updates, exist once.

A step of three processes; the first keeps the state::

    process 0                process 1           process 2
    gradients ───────────────gradients ──────────gradients      (1) reduced, as by MirroredStrategy
    optimizer: m, v          no optimizer state  no optimizer state
    variables updated once                                      (2) by the optimizer of process 0
    values ─────────────────►taken over ────────►taken over     (3) what the next step is computed with
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from choros.distribute.fit.training import Training
from choros.distribute.job_replicas import synchronous_training
from choros.distribute.joining import join
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.strategy import Strategy
from choros.errors import ConfigError, StrategyError

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training in which one process of the host keeps the optimizer's state and makes each update, once.

    Every other replica saves the memory of that state: with Adam twice that of the variables. Each has the values that
    its steps compute with, as a device of ``tf.distribute``'s has while it computes.

    Args:
        compute_devices: ``tf.distribute``'s; here each process that ``chorosrun`` starts is a replica, so this can only
            say how many there are.
        parameter_device: ``tf.distribute``'s; the first process's device.

    Raises:
        ConfigError: there are not so many processes.
        StrategyError: the job has several hosts.
    """

    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None) -> None:
        del parameter_device
        topology = join()
        if topology.cross_size > 1:
            raise StrategyError(
                f"CentralStorageStrategy keeps variables on one host, and this job runs on {topology.cross_size}: use "
                "MultiWorkerMirroredStrategy, or ParameterServerStrategy."
            )
        if compute_devices is not None and len(compute_devices) != topology.size:
            raise ConfigError(
                f"compute_devices={list(compute_devices)!r} asks for {len(compute_devices)} replicas, but this job has "
                f"{topology.size}: each process has one. Start the script with chorosrun -np {len(compute_devices)}."
            )
        super().__init__(ProcessReplicas(topology.size, topology.rank))
        self._training = synchronous_training(topology, state_owner=0)

    @property
    def training(self) -> Training | None:
        """Synchronous, with one process that updates."""
        return self._training
