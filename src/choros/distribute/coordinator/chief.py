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
from choros.distribute.coordinator.closures import Reference
from choros.distribute.coordinator.definitions import Definition, Definitions, missing
from choros.distribute.coordinator.messages import Joined, Ran, Run, StartJob
from choros.distribute.coordinator.metrics import MetricReports
from choros.distribute.coordinator.queue import Closure, ClosureQueue
from choros.distribute.coordinator.remote_value import PerWorkerDataset, PerWorkerValues, RemoteValue
from choros.distribute.coordinator.role import CoordinatorRole
from choros.distribute.coordinator.slow_workers import WorkerTimes
from choros.distribute.parameter_server.cluster import Cluster, Receive
from choros.distribute.parameter_server.jobs import wait_for_end
from choros.distribute.parameter_server.messages import Shutdown
from choros.distribute.parameter_server.optimizer import remote_optimizers
from choros.distribute.parameter_server.session import ServerSession
from choros.errors import ConfigError, EngineError
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.remote_errors import Failure

__all__ = ["Chief"]

_log = logging.getLogger(__name__)

#: How long the chief waits at its exit for the workers to receive ``Shutdown``.
_END_SECONDS = 10.0
#: How long one attempt to connect to a worker lasts.
_ATTEMPT_SECONDS = 1.0
_POLL_SECONDS = 0.05
#: How often workers are compared.
_TIMES_SECONDS = 60.0


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
        start: what workers receive first.
        max_staleness: as in ``ParameterServerStrategy``.
    """

    def __init__(
        self,
        strategy: Any,
        session: ServerSession,
        cluster: Cluster,
        start: StartJob,
        max_staleness: int | None,
    ) -> None:
        self._strategy = strategy
        self._session = session
        self._cluster = cluster
        self._start = start
        self._queue = ClosureQueue(Clocks(max_staleness), cluster.start_seconds)
        self._reports = MetricReports(session.objects)
        self._definitions = Definitions(session, self._reference)
        self._times = WorkerTimes()
        self._times_lock = threading.Lock()
        self._times_due = time.monotonic() + _TIMES_SECONDS
        self._used = False
        self._flushed = True
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True) for index in range(len(cluster.workers))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

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
        self._used = True
        if self._flushed:
            self._session.publish()
        pickled, uses = self._definitions.dumps(function)
        arguments, also = self._definitions.dumps((tuple(args), dict(kwargs)))
        definitions = self._definitions.of(uses | also)
        key = hashlib.sha256(pickled).digest()
        rates = {number: remote.learning_rate for number, remote in remote_optimizers(self._session.objects).items()}
        learning_rates = {number: rate for number, rate in rates.items() if rate is not None}
        closure = Closure(closures.name_of(function), pickled, key, arguments, learning_rates, definitions)
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
        return PerWorkerDataset(self._definitions.add_dataset(dataset_fn))

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

    def _serve(self, index: int) -> None:
        """Connects to a worker whenever it listens, and sends closures to it, in a thread of its own."""
        while not self._ending.is_set():
            try:
                channel = self._cluster.connect("worker", index, _ATTEMPT_SECONDS)
            except EngineError as error:
                self._queue.refused(str(error))
            else:
                try:
                    self._work(channel, self._cluster.waits_for("worker", index, "a function on"))
                except ChannelClosed as error:
                    self._queue.refused(str(error))
                    _log.warning("%s is lost; another worker runs its function again", channel.peer)
                else:
                    return
            time.sleep(_POLL_SECONDS)

    def _work(self, channel: Channel, receive: Receive) -> None:
        """Sends closures to a worker until the queue is closed."""
        channel.send(self._start)
        joined: Joined | Failure = receive(channel)
        if isinstance(joined, Failure):
            channel.close()
            raise ChannelClosed(f"{channel.peer} could not join: {joined.error()}")
        known, functions = dict(joined.known), set[bytes]()
        self._queue.add_worker()
        try:
            while (closure := self._queue.take(channel)) is not None:
                try:
                    reply = self._run(channel, receive, joined, closure, known, functions)
                except ChannelClosed:
                    self._queue.lost(channel.peer, closure)
                    raise
                if isinstance(reply, Ran):
                    self._finish(channel, closure, reply)
                else:
                    self._queue.failed(channel, closure, reply.error())
            channel.send(Shutdown())
        finally:
            self._queue.remove_worker(channel)

    def _run(
        self,
        channel: Channel,
        receive: Receive,
        joined: Joined,
        closure: Closure,
        known: dict[Reference, int],
        functions: set[bytes],
    ) -> Ran | Failure:
        own = self._session.objects.kinds[: len(joined.kinds)]
        if joined.kinds != own:
            return Failure.of(
                ConfigError(
                    f"{channel.peer} has created {', '.join(joined.kinds)} in the scope, the chief "
                    f"{', '.join(own) or 'nothing'}: workers must run the same script as the chief up to the first "
                    "schedule() or fit(), or serve from the beginning with distribute.Server."
                )
            )
        definitions = missing(closure.definitions, known)
        for definition in definitions:
            if definition.error:
                return Failure.of(ConfigError(self._not_sent(closure, channel, definition)))
        function = None if closure.key in functions else pickle.PickleBuffer(closure.function)
        channel.send(
            Run(closure.key, function, pickle.PickleBuffer(closure.arguments), closure.learning_rates, definitions)
        )
        reply: Ran | Failure = receive(channel)
        if isinstance(reply, Ran):
            functions.add(closure.key)
            known.update({each.reference: each.revision for each in definitions})
        return reply

    def _not_sent(self, closure: Closure, channel: Channel, definition: Definition) -> str:
        tag, number = definition.reference
        if tag == "dataset":
            item = f"data set {number} of create_per_worker_dataset()"
        else:
            of = self._session.objects.resolve(("created" if tag == "compiled" else tag, number))
            item = f"the {type(of).__name__} {getattr(of, 'name', '')!r}"
        return (
            f"{closure.name} uses {item}, which {channel.peer} does not have and cannot be sent ({definition.error}): "
            "create it before the first schedule() or fit(), up to which workers run the script, or so that Keras can "
            "save it."
        )

    def _finish(self, channel: Channel, closure: Closure, ran: Ran) -> None:
        try:
            result = closures.loads(ran.result, self._session.objects.resolve)
        except Exception as error:  # noqa: BLE001  (the user's own types are unpickled)
            self._queue.failed(channel, closure, error)
            return
        self._reports.add(ran.metrics)
        self._queue.done(channel, closure, result)
        with self._times_lock:
            self._times.note(channel.peer, closure.name, ran.seconds, ran.waiting)
            if time.monotonic() >= self._times_due:
                self._compare_workers()

    def _compare_workers(self) -> None:
        self._times_due = time.monotonic() + _TIMES_SECONDS
        if sentence := self._times.sentence():
            _log.warning("%s.", sentence)

    def close(self) -> None:
        """Shuts down workers and servers at the end of the script; waits for workers that do not listen yet, and for
        those workers and servers that are threads of this process.
        """
        atexit.unregister(self.close)
        self._queue.close()
        deadline = time.monotonic() + (_END_SECONDS if self._used else _ATTEMPT_SECONDS)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ending.set()
        with self._times_lock:
            self._compare_workers()
        self._session.servers.shutdown()
        wait_for_end(self._start.job)
