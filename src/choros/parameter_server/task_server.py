"""``Server``: a worker or a parameter server, in a process of its own or in the chief's (``tf.distribute.Server``)."""

import logging
import threading
from contextlib import nullcontext
from typing import Any, final

from choros.distribute.cluster_resolver import ClusterSpec
from choros.errors import ConfigError, EngineError
from choros.parameter_server.cluster import Cluster
from choros.parameter_server.jobs import JobServer
from choros.parameter_server.messages import StartJob
from choros.transport.channel import Channel

_log = logging.getLogger(__name__)


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


def _run_functions(server: JobServer, chief: Channel, start: StartJob) -> None:
    """Runs the functions of a chief, with copies of its objects."""
    import keras

    from choros.parameter_server.strategy import ParameterServerStrategy
    from choros.parameter_server.worker import Worker

    # On JAX, a step that waits for the servers in a callback holds threads of XLA's pool.
    worker = Worker(server.cluster, _exclusive if keras.backend.backend() == "jax" else nullcontext())
    try:
        job, _ = start
        with server.job(job):
            ParameterServerStrategy.of_worker(worker)
            worker.run(chief, start)
    except EngineError as error:
        _log.warning("%s: %s", server.cluster.name, error)


_exclusive = threading.Lock()
