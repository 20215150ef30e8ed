"""``ParameterServerStrategy``: asynchronous training with variables on parameter servers; and ``Server``: a worker or a
parameter server, in a process of its own or in the chief's (``tf.distribute.Server``).
"""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

from choros.distribute.cluster_resolver import ClusterSpec, TFConfigClusterResolver
from choros.distribute.replicas import ProcessReplicas
from choros.distribute.strategy import Strategy
from choros.distribute.training import Training
from choros.errors import ConfigError, EngineError, StrategyError
from choros.parameter_server.cluster import Cluster, JobServer, leave_signals_to_the_chief
from choros.parameter_server.placement import Partition
from choros.transport.channel import Channel

if TYPE_CHECKING:
    from choros.parameter_server.chief import Chief
    from choros.parameter_server.worker import Worker

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VariableShard:
    """A shard of a variable, and the index of the parameter server that stores it."""

    shape: tuple[int, ...]
    server: int

    @property
    def device(self) -> str:
        """The parameter server, as TensorFlow names devices.

        >>> VariableShard((4, 2), server=1).device
        '/job:ps/replica:0/task:1/device:CPU:0'
        """
        return f"/job:ps/replica:0/task:{self.server}/device:CPU:0"


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: workers compute gradients without waiting for each other (``tf.distribute``'s name).

    The variables and the optimizer's state are stored on parameter servers. Workers and servers are started with
    ``Server``, in processes of their own or in the chief's; or every process runs the same script::

        chief       all of it; its fit distributes batches and collects metrics, runs callbacks, writes files, prints
        worker      up to the first fit() or ClusterCoordinator.schedule(), which serves the chief until the job ends
        ps          up to this constructor, which serves and ends the process
        evaluator   all of it, on its own, outside the training

    In each step a worker pulls the variables and computes the gradient of its batch, and the servers apply it. A slow
    worker therefore does not delay the others; it does fewer steps. If a worker is lost, another one trains on its
    batch; when it is restarted, it participates again. If a server is lost, the chief raises ``ParameterServerLost``.

    While no step is running, the chief's models and optimizers have the servers' values: the chief saves them as a
    single device would, and the servers continue from what it restores before ``fit``. While workers and servers serve,
    they ignore SIGINT and SIGTERM, so that Ctrl-C and preemption leave the chief time to save; they end with the chief.

    Args:
        cluster_resolver: describes the cluster and this process's role; by default from ``TF_CONFIG``, which
            ``chorosrun --ps`` sets.
        variable_partitioner: shards large variables across several servers, for example ``MinSizePartitioner()``.
        max_staleness: the maximum number of steps that a worker may be ahead of another active worker when it starts a
            step (Ho et al., 2013); ``None`` sets no bound.

    Raises:
        ConfigError: the cluster lacks workers or servers, or this process is not part of it;
            ``CHOROS_SECRET`` is required and not set; ``max_staleness`` is negative.
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
                f"max_staleness={max_staleness!r} is invalid: pass a number of steps, at least 0, or None for no bound."
            )
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        cluster = Cluster.of(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
        super().__init__(ProcessReplicas(alone=True), Training(), resolver)
        #: The role of this process in the cluster; ``None`` for the evaluator.
        self.role: Chief | Worker | None = None
        match cluster.role:
            case "ps":
                _serve(cluster)
            case "chief":
                from choros.parameter_server.chief import Chief

                self._take(Chief(cluster, variable_partitioner, max_staleness))
            case "worker":
                from choros.parameter_server.worker import Worker

                self._take(Worker(cluster))

    @classmethod
    def of_worker(cls, worker: Worker) -> ParameterServerStrategy:
        """Returns the strategy of a worker that does not run the script."""
        strategy = cls.__new__(cls)
        Strategy.__init__(strategy, ProcessReplicas(alone=True), None)
        strategy._take(worker)
        return strategy

    def _take(self, role: Chief | Worker) -> None:
        from choros.parameter_server.training import ServerTraining

        self.role = role
        self.training = ServerTraining(role)
        role.strategy = self

    def shards(self, variable: Any) -> tuple[VariableShard, ...]:
        """Returns the shards of a variable of a model in the scope, in the order of their rows.

        Keras 3 has one variable for each weight, where TensorFlow's strategy replaces it by its shards.

        Args:
            variable: a weight of a built model; one that is not sharded has one shard.

        Raises:
            ConfigError: it is no such weight.
            StrategyError: this process is a worker that does not serve yet, or the evaluator.
        """
        if self.role is None:
            raise StrategyError("the evaluator has no connection to the parameter servers, and knows no shards.")
        shape = tuple(variable.shape)
        return tuple(
            VariableShard((*(shape if shard.end is None else (shard.end - shard.begin, *shape[1:])),), server)
            for server, shard in self.role.session.shards_of(variable)
        )


def _serve(cluster: Cluster) -> NoReturn:
    """Serves as a parameter server until the job has ended, and exits."""
    from choros.parameter_server.server import serve_shards

    leave_signals_to_the_chief()
    server = JobServer(cluster, serve_shards)
    server.run()
    server.close()
    raise SystemExit(0)


@final
class Server:
    """A worker or a parameter server of ``ParameterServerStrategy``, which serves in threads of this process.

    The chief sends it everything that it needs: it does not run the script. Several of them, and the chief, may be in
    one process, for notebooks and tests::

        cluster = {"worker": ["localhost:2001", "localhost:2002"], "ps": ["localhost:2003"]}
        servers = [distribute.Server(cluster, role, index) for role in cluster for index in range(len(cluster[role]))]
        strategy = distribute.ParameterServerStrategy(distribute.cluster_resolver.SimpleClusterResolver(cluster))

    In a process of its own, call ``join``::

        distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()

    It serves one chief after another, until its process ends.

    Args:
        server_or_cluster_def: the cluster; a ``ClusterSpec``, including TensorFlow's, or a dictionary of addresses.
        job_name: ``"worker"`` or ``"ps"``.
        task_index: the index of this task in its job.
        protocol: the prefix of ``target``; has no other effect.
        config: has no effect.
        start: whether to start it now.

    Raises:
        ConfigError: this is no worker or parameter server of the cluster; ``CHOROS_SECRET`` is required and not set.
        EngineError: it cannot listen at its address.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        del config
        if job_name not in ("worker", "ps"):
            raise ConfigError(
                f'Server(job_name={job_name!r}): pass "worker" or "ps". The chief, which runs the script, needs no '
                "server."
            )
        self._cluster = Cluster.of(ClusterSpec(server_or_cluster_def), job_name, task_index or 0)
        self._protocol = protocol or "grpc"
        self._task: JobServer | None = None
        if start:
            self.start()

    @property
    def target(self) -> str:
        """The address, with TensorFlow's prefix."""
        return f"{self._protocol}://{self._cluster.address}"

    def start(self) -> None:
        """Starts listening at the address of this task; does nothing if it does already."""
        self._started()

    def join(self) -> None:
        """Waits until the first chief has ended its job.

        Raises:
            EngineError: no chief connected within ``CHOROS_START_TIMEOUT``, or it failed.
        """
        self._started().run()

    def _started(self) -> JobServer:
        from choros.parameter_server.server import serve_shards

        if self._task is None:
            self._task = JobServer(self._cluster, serve_shards if self._cluster.role == "ps" else _run_functions)
        return self._task


def _run_functions(server: JobServer, chief: Channel, job: str) -> None:
    """Runs the functions of a chief, with copies of its objects."""
    import keras

    from choros.parameter_server.worker import Worker

    # On JAX, a step that waits for the servers in a callback holds threads of XLA's pool.
    worker = Worker(server.cluster, _exclusive if keras.backend.backend() == "jax" else nullcontext())
    try:
        with server.job(job):
            ParameterServerStrategy.of_worker(worker)
            worker.run(chief, job)
    except EngineError as error:
        _log.warning("%s: %s", server.cluster.name, error)


_exclusive = threading.Lock()
