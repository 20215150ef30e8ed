"""The role that a process takes when it creates a ``ParameterServerStrategy``."""

from __future__ import annotations

import secrets
from typing import Any

import cloudpickle
import keras

from choros.distribute.coordinator.chief import Chief
from choros.distribute.coordinator.messages import StartJob
from choros.distribute.coordinator.role import CoordinatorRole
from choros.distribute.coordinator.worker import Worker
from choros.distribute.fit.local import LocalTraining
from choros.distribute.fit.training import Training
from choros.distribute.parameter_server.cluster import Cluster
from choros.distribute.parameter_server.placement import Partition
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.server import ParameterServer
from choros.distribute.parameter_server.session import ServerSession
from choros.distribute.parameter_server.signals import leave_signals_to_the_chief
from choros.distribute.parameter_server.training import ChiefTraining, WorkerTraining
from choros.errors import ConfigError

__all__ = ["take_role", "worker_role"]


def take_role(
    strategy: Any, cluster: Cluster, partition: Partition | None, max_staleness: int | None
) -> tuple[CoordinatorRole | None, Training]:
    """Starts the role that the cluster assigns to this process.

    Raises:
        SystemExit: this process is a parameter server, and the job has ended.
        ConfigError: the partitioner cannot be sent to workers.
    """
    match cluster.role:
        case "ps":
            leave_signals_to_the_chief()
            server = ParameterServer(cluster)
            server.run()
            server.close()
            raise SystemExit(0)
        case "chief":
            start = StartJob(secrets.token_hex(8), _pickled(partition))
            session = ServerSession(ScopeObjects(), cluster.servers(start.job), partition)
            chief = Chief(strategy, session, cluster, start, max_staleness)
            return chief, ChiefTraining(chief, len(cluster.workers))
        case "worker":
            return worker_role(strategy, Worker(cluster))
        case _:
            return None, LocalTraining()


def worker_role(strategy: Any, worker: Worker) -> tuple[CoordinatorRole, Training]:
    """Returns the role of a worker and its training."""
    if keras.backend.backend() == "jax":
        from choros.arrays.xla_threads import spare_xla_thread

        spare_xla_thread()
    worker.set_strategy(strategy)
    return worker, WorkerTraining(worker)


def _pickled(partition: Partition | None) -> bytes:
    try:
        return bytes(cloudpickle.dumps(partition))
    except Exception as error:
        raise ConfigError(f"the variable_partitioner cannot be sent to workers ({error}): use a function.") from error
