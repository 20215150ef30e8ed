"""MultiWorkerMirroredStrategy: the replicas of several hosts."""

from __future__ import annotations

from typing import Any, final

from choros.distribute.fit.training import Training
from choros.distribute.job_replicas import cluster_of, replicas_of
from choros.distribute.joining import join
from choros.distribute.strategy import Strategy

__all__ = ["MultiWorkerMirroredStrategy"]


@final
class MultiWorkerMirroredStrategy(Strategy):
    """``MirroredStrategy`` over any number of hosts.

    Processes are started by ``chorosrun -np N -H host1:4,host2:4``, by ``srun``, or by hand on each host with
    ``TF_CONFIG``, which lists the workers' addresses. Started by hand, PyTorch alone sends the
    gradients, and mpirun is not needed.

    Args:
        cluster_resolver: provides the workers' addresses where no launcher does; ``None`` reads ``TF_CONFIG``.
        communication_options: has no effect; the engine decides how values are sent.

    Raises:
        ConfigError: ``TF_CONFIG`` is invalid.
        EngineUnavailable: a worker did not connect in time.

    Example:
        >>> from choros import distribute
        >>> distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync
        1
    """

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        del communication_options
        topology = join(cluster_resolver)
        replicas, training = replicas_of(topology)
        super().__init__(replicas, cluster_of(topology) if cluster_resolver is None else cluster_resolver)
        self._training = training

    @property
    def training(self) -> Training | None:
        """Synchronous."""
        return self._training
