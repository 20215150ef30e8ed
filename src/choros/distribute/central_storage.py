"""CentralStorageStrategy: one process keeps the optimizer's state and applies the updates.

A step of three processes; process 0 keeps the state::

    process 0                process 1           process 2
    gradients ───────────────gradients ──────────gradients      (1) reduced, as by MirroredStrategy
    optimizer: m, v          no optimizer state  no optimizer state
    variables updated once                                      (2) by the optimizer of process 0
    values ─────────────────►received ──────────►received       (3) broadcast; the next step computes with them
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
    """Synchronous training on one host, in which one process keeps the optimizer's state and applies each update.

    The other replicas save the memory of that state: with Adam twice that of the variables. Every replica has a copy of
    the variables, as in ``tf.distribute`` each device has while it computes.

    Args:
        compute_devices: as in ``tf.distribute``. Each process that ``chorosrun`` starts is a replica here, so only the
            number of devices counts.
        parameter_device: has no effect; it is the device of process 0.

    Raises:
        ConfigError: ``compute_devices`` has another length than the number of processes.
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
                f"compute_devices={list(compute_devices)!r} requests {len(compute_devices)} replicas, but this job has "
                f"{topology.size}: one per process. Start the script with chorosrun -np {len(compute_devices)}."
            )
        super().__init__(ProcessReplicas())
        self._training = synchronous_training(state_owner=0)

    @property
    def training(self) -> Training | None:
        """Synchronous, with one process that applies the updates."""
        return self._training
