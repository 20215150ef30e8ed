"""The chief: sends closures to the workers, collects their results, and shuts all processes down at the end."""

from __future__ import annotations

import atexit
import hashlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from choros.distribute.coordinator import closures
from choros.distribute.coordinator.clocks import Clocks
from choros.distribute.coordinator.messages import Ran, Run
from choros.distribute.coordinator.metrics import MetricReports
from choros.distribute.coordinator.queue import Closure, ClosureQueue
from choros.distribute.coordinator.remote_value import PerWorkerDataset, PerWorkerValues, RemoteValue
from choros.distribute.coordinator.role import CoordinatorRole
from choros.distribute.parameter_server.cluster import Cluster
from choros.distribute.parameter_server.messages import Hello, Shutdown
from choros.distribute.parameter_server.optimizer import remote_optimizers
from choros.distribute.parameter_server.session import ServerSession
from choros.errors import ConfigError
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.listener import Listener
from choros.transport.remote_errors import Failure

__all__ = ["Chief"]

_log = logging.getLogger(__name__)

#: How long the chief waits at its exit for the workers to receive ``Shutdown``.
_END_SECONDS = 10.0
_POLL_SECONDS = 0.02


@final
class Chief(CoordinatorRole):
    """The chief's role.

    While closures are waiting or running, the current variables are on the servers; otherwise they are in the chief's
    models: the first closure after a pause publishes what changed on the chief, and the end of the last one pulls what
    changed on the servers.

    Args:
        strategy: the job's strategy.
        session: the server session of this process.
        cluster: the job's processes.
        max_staleness: as in ``ParameterServerStrategy``.
    """

    def __init__(self, strategy: Any, session: ServerSession, cluster: Cluster, max_staleness: int | None) -> None:
        self._strategy = strategy
        self._session = session
        self._queue = ClosureQueue(Clocks(max_staleness), cluster.start_seconds)
        self._reports = MetricReports(session.objects)
        self._datasets = 0
        self._created: tuple[str, ...] | None = None
        self._flushed = True
        self._worker_count = len(cluster.workers)
        self._connected: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._listener = Listener(cluster.chief, cluster.key, cluster.name, self._serve)
        atexit.register(self._close)

    @property
    def session(self) -> ServerSession:
        """The server session; available at any time."""
        return self._session

    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
    ) -> RemoteValue:
        """Schedules ``function`` on a worker; blocks while ``limit`` closures are waiting or running.

        Raises:
            ConfigError: the function or one of its arguments cannot be pickled.
            Exception: the error of an earlier closure.
        """
        if self._flushed:
            self._session.publish()
            self._created = self._session.objects.kinds if self._created is None else self._created
        pickled = closures.dumps(function, self._reference)
        arguments = closures.dumps((tuple(args), dict(kwargs)), self._reference)
        key = hashlib.sha256(pickled).digest()
        rates = {number: remote.learning_rate for number, remote in remote_optimizers(self._session.objects).items()}
        learning_rates = {number: rate for number, rate in rates.items() if rate is not None}
        closure = Closure(closures.name_of(function), pickled, key, arguments, learning_rates)
        self._flushed = False
        self._queue.put(closure, limit)
        return closure.result

    def join(self) -> None:
        """Waits for all closures; afterwards this process has their metrics and the servers' variables."""
        self._queue.wait()
        self._flush()

    def done(self) -> bool:
        """Returns whether all closures are done; if so, the state is that after ``join``."""
        if not self._queue.idle:
            return False
        self._flush()
        return True

    def flush_metrics(self) -> bool:
        """Adds the workers' metric reports so far to the chief's metrics; returns whether there were any."""
        return self._reports.flush()

    def dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Returns the handle of a data set that every worker creates for itself."""
        del dataset_fn  # The chief needs no data set.
        self._datasets += 1
        return PerWorkerDataset(self._datasets - 1)

    def _flush(self) -> None:
        if not self._flushed:
            self._flushed = True
            self._reports.flush()
            self.refresh()

    def refresh(self) -> None:
        """Pulls the servers' current values."""
        self._session.pull()

    def _reference(self, item: Any) -> closures.Reference | None:
        if isinstance(item, RemoteValue):
            raise ConfigError(
                "a RemoteValue was passed to schedule(): pass its value, remote_value.get(), or do both steps in one "
                "function."
            )
        if isinstance(item, PerWorkerValues):
            return ("per_worker", item.dataset, item.iterator)
        if item is self._session or item is self._strategy:
            return ("session",) if item is self._session else ("strategy",)
        return self._session.objects.reference(item)

    def _serve(self, channel: Channel, hello: Hello) -> None:
        """Sends closures to one worker, in the thread of its connection."""
        self._connected.add(channel.peer)
        self._threads.append(threading.current_thread())
        self._queue.add_worker()
        known: set[bytes] = set()
        try:
            while (closure := self._queue.take(channel)) is not None:
                try:
                    reply = self._run(channel, hello, closure, known)
                except ChannelClosed:
                    self._queue.lost(channel.peer, closure)
                    raise
                if isinstance(reply, Ran):
                    self._finish(channel, closure, reply)
                else:
                    self._queue.failed(channel, closure, reply.error())
            channel.send(Shutdown())
        except ChannelClosed:
            _log.warning("%s is lost; another worker runs its function again", channel.peer)
        finally:
            self._queue.remove_worker(channel)

    def _run(self, channel: Channel, hello: Hello, closure: Closure, known: set[bytes]) -> Ran | Failure:
        if hello.created != self._created:
            return Failure.of(
                ConfigError(
                    f"{channel.peer} has created {', '.join(hello.created) or 'nothing'} in the scope, the chief "
                    f"{', '.join(self._created or ())}: every process must run the same script, and create the same "
                    "models and optimizers before the first schedule() or fit()."
                )
            )
        function = None if closure.key in known else pickle.PickleBuffer(closure.function)
        known.add(closure.key)
        arguments = pickle.PickleBuffer(closure.arguments)
        channel.send(Run(closure.key, function, arguments, closure.learning_rates))
        reply: Ran | Failure = channel.receive()
        return reply

    def _finish(self, channel: Channel, closure: Closure, ran: Ran) -> None:
        try:
            result = closures.loads(ran.result, self._session.objects.resolve)
        except Exception as error:  # noqa: BLE001  (the user's own types are unpickled)
            self._queue.failed(channel, closure, error)
            return
        self._reports.add(ran.metrics)
        self._queue.done(channel, closure, result)

    def _close(self) -> None:
        """Shuts down workers and servers at the end of the script; waits for workers that have yet to connect."""
        self._queue.close()
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline and (self._awaiting_workers() or self._serving()):
            time.sleep(_POLL_SECONDS)
        self._session.servers.shutdown()

    def _awaiting_workers(self) -> bool:
        return self._created is not None and len(self._connected) < self._worker_count

    def _serving(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)
