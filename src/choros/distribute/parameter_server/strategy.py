"""ParameterServerStrategy: asynchronous training with variables on servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from choros.distribute.cluster_resolver import TFConfigClusterResolver
from choros.distribute.fit.training import Training
from choros.distribute.parameter_server.cluster import Cluster
from choros.distribute.parameter_server.placement import Partition
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.strategy import Strategy
from choros.errors import ConfigError

if TYPE_CHECKING:
    from choros.distribute.coordinator.role import Role

__all__ = ["ParameterServerStrategy"]


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: workers compute gradients without waiting for each other (``tf.distribute``'s name).

    Variables and the optimizer's state live on parameter servers. Every process runs the same script::

        chief       all of it. Its fit hands out batches and takes in metrics; it runs callbacks, writes files, prints
        worker      up to the first fit() or ClusterCoordinator.schedule(), which serves the chief and ends the process
        ps          up to here: this constructor serves, and ends the process
        evaluator   all of it, for itself: it takes no part

    Before each step a worker pulls the variables, then it computes a gradient of its batch, and a server applies it. So
    a slow worker holds nobody up, and does fewer steps. A worker that is lost is done without; its batch goes to
    another one, and when it is started again it takes part again. A lost server is an error, ``ParameterServerLost``,
    on the chief.

    When no step is at work, the chief's models and optimizers have all that the servers do: it saves them as one device
    would, and what it restores before ``fit`` the servers go on with. While workers and servers serve, they ignore
    SIGINT and SIGTERM, so that Ctrl-C and preemption leave the chief time to save; they end when it does.

    Args:
        cluster_resolver: tells the cluster and this process's role; ``TF_CONFIG`` by default, which ``chorosrun --ps``
            sets.
        variable_partitioner: cuts large variables, so that several servers share them, such as
            ``MinSizePartitioner()``.
        max_staleness: no worker begins a step when it is more than so many steps ahead of one that is still at work
            (Ho et al., 2013); ``None`` sets no bound.

    Raises:
        ConfigError: there is no cluster with chief, workers and servers, or this process is none of them;
            ``CHOROS_SECRET`` is needed and not set; ``max_staleness`` is no number of steps.
        EngineError: the servers could not be reached within ``CHOROS_START_TIMEOUT``.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Partition | None = None,
        *,
        max_staleness: int | None = None,
    ) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(
                f"max_staleness={max_staleness!r}: a number of steps of at least 0, or None for no bound."
            )
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        super().__init__(ProcessReplicas(1, 0), resolver)
        cluster = Cluster.of(resolver)
        from choros.distribute.parameter_server.roles import take_role

        self._role, self._training = take_role(self, cluster, variable_partitioner, max_staleness)

    @property
    def role(self) -> Role | None:
        """What this process does in the cluster; ``None`` for the evaluator."""
        return self._role

    @property
    def training(self) -> Training:
        """The chief's, a worker's, or Keras' own for the evaluator."""
        return self._training
