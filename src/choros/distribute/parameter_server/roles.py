"""The role that a process takes when it creates a ``ParameterServerStrategy``."""

from __future__ import annotations

from typing import Any

import keras

from choros.distribute.coordinator.chief import Chief
from choros.distribute.coordinator.role import CoordinatorRole
from choros.distribute.coordinator.worker import Worker
from choros.distribute.fit.local import LocalTraining
from choros.distribute.fit.training import Training
from choros.distribute.parameter_server.cluster import Cluster
from choros.distribute.parameter_server.messages import Hello
from choros.distribute.parameter_server.placement import Partition
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.server import ParameterServer
from choros.distribute.parameter_server.session import ServerSession
from choros.distribute.parameter_server.signals import leave_signals_to_the_chief
from choros.distribute.parameter_server.training import ChiefTraining, WorkerTraining

__all__ = ["take_role"]


def take_role(
    strategy: Any, cluster: Cluster, partition: Partition | None, max_staleness: int | None
) -> tuple[CoordinatorRole | None, Training]:
    """Starts the role that the cluster assigns to this process.

    Raises:
        SystemExit: this process is a parameter server, and the job has ended.
    """
    objects = ScopeObjects()
    match cluster.role:
        case "ps":
            leave_signals_to_the_chief()
            ParameterServer(cluster.ps[cluster.index], cluster.key, cluster.name).run(cluster.start_seconds)
            raise SystemExit(0)
        case "chief":
            session = ServerSession(objects, cluster.servers(Hello()), partition)
            chief = Chief(strategy, session, cluster, max_staleness)
            return chief, ChiefTraining(chief, len(cluster.workers))
        case "worker":
            if keras.backend.backend() == "jax":
                from choros.training.device import spare_xla_thread

                spare_xla_thread()
            worker = Worker(strategy, objects, cluster, partition)
            return worker, WorkerTraining(worker, objects)
        case _:
            return None, LocalTraining()
