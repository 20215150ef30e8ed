"""The chief's side: hands out closures, keeps the workers' results, and tells all when it is over."""

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
from choros.distribute.coordinator.role import Role
from choros.distribute.parameter_server.cluster import Cluster
from choros.distribute.parameter_server.messages import Hello, Shutdown
from choros.distribute.parameter_server.optimizer import pushers
from choros.distribute.parameter_server.session import Session
from choros.errors import ConfigError
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.listener import Listener
from choros.transport.remote_errors import Failure

__all__ = ["Chief"]

_log = logging.getLogger(__name__)

#: How long the chief's end waits for workers to hear of it.
_END_SECONDS = 10.0
_POLL_SECONDS = 0.02


@final
class Chief(Role):
    """What the chief of a job does.

    While closures are waiting or running, the servers hold the variables; while none is, the chief's models do: the
    first closure after a pause sends what has changed here, and the end of the last one brings back what has changed
    there.

    Args:
        strategy: whose job it is.
        session: the job's variables, as this process has them.
        cluster: the job's processes.
        max_staleness: as in ``ParameterServerStrategy``.
    """

    def __init__(self, strategy: Any, session: Session, cluster: Cluster, max_staleness: int | None) -> None:
        self._strategy = strategy
        self._session = session
        self._queue = ClosureQueue(Clocks(max_staleness), cluster.start_seconds)
        self._reports = MetricReports(session.objects)
        self._datasets = 0
        self._made: tuple[str, ...] | None = None
        self._settled = True
        self._workers = len(cluster.workers)
        self._seen: set[int] = set()
        self._serving: list[threading.Thread] = []
        self._listener = Listener(cluster.chief, cluster.key, self._serve)
        atexit.register(self._close)

    @property
    def session(self) -> Session:
        """At any time."""
        return self._session

    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
    ) -> RemoteValue:
        """Has a worker run ``function``; waits while ``limit`` closures are waiting or running.

        Raises:
            ConfigError: it, or one of its arguments, cannot travel.
            Exception: of an earlier closure.
        """
        if self._settled:
            self._session.publish()
            self._made = self._session.objects.kinds if self._made is None else self._made
        pickled = closures.dumps(function, self._reference)
        arguments = closures.dumps((tuple(args), dict(kwargs)), self._reference)
        key = hashlib.sha256(pickled).digest()
        rates = {number: pusher.learning_rate for number, pusher in pushers(self._session.objects).items()}
        given = {number: rate for number, rate in rates.items() if rate is not None}
        closure = Closure(closures.name_of(function), pickled, key, arguments, given)
        self._settled = False
        self._queue.put(closure, limit)
        return closure.result

    def join(self) -> None:
        """Waits for all closures; then this process has their metrics and the servers' variables."""
        self._queue.wait()
        self._settle()

    def done(self) -> bool:
        """Whether all closures are done; if so, as after ``join``."""
        if not self._queue.idle:
            return False
        self._settle()
        return True

    def settle_metrics(self) -> bool:
        """Adds what workers have reported so far to the metrics of the chief's models; whether there was anything."""
        return self._reports.settle()

    def dataset(self, made: Any) -> PerWorkerDataset:
        """A data set that every worker makes for itself."""
        del made  # The chief needs none.
        self._datasets += 1
        return PerWorkerDataset(self._datasets - 1)

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._reports.settle()
            self.refresh()

    def refresh(self) -> None:
        """Takes over what the servers have now."""
        self._session.pull()

    def _reference(self, item: Any) -> closures.Reference | None:
        if isinstance(item, RemoteValue):
            raise ConfigError(
                "a RemoteValue was passed to schedule(): pass its value, remote_value.get(), or do both in one "
                "function."
            )
        if isinstance(item, PerWorkerValues):
            return ("per_worker", item.dataset, item.iterator)
        if item is self._session or item is self._strategy:
            return ("session",) if item is self._session else ("strategy",)
        return self._session.objects.reference(item)

    def _serve(self, channel: Channel, hello: Hello) -> None:
        """Runs closures on one worker, in the thread of its connection."""
        channel.peer = f"worker {hello.index}"
        self._seen.add(hello.index)
        self._serving.append(threading.current_thread())
        self._queue.came()
        had: set[bytes] = set()
        try:
            while (closure := self._queue.take(channel)) is not None:
                try:
                    answer = self._run(channel, hello, closure, had)
                except ChannelClosed:
                    self._queue.lost(channel.peer, closure)
                    raise
                if isinstance(answer, Ran):
                    self._finish(channel, closure, answer)
                else:
                    self._queue.failed(channel, closure, answer.error())
            channel.send(Shutdown())
        except ChannelClosed:
            _log.warning("%s is lost; what it was at is run by another", channel.peer)
        finally:
            self._queue.left(channel)

    def _run(self, channel: Channel, hello: Hello, closure: Closure, had: set[bytes]) -> Ran | Failure:
        if hello.made != self._made:
            return Failure.of(
                ConfigError(
                    f"{channel.peer} has made {', '.join(hello.made) or 'nothing'} in the scope, the chief "
                    f"{', '.join(self._made or ())}: every process must run the same script, and make the same models "
                    "and optimizers before the first schedule() or fit()."
                )
            )
        function = None if closure.key in had else pickle.PickleBuffer(closure.function)
        had.add(closure.key)
        arguments = pickle.PickleBuffer(closure.arguments)
        channel.send(Run(closure.key, function, arguments, closure.learning_rates))
        answer: Ran | Failure = channel.receive()
        return answer

    def _finish(self, channel: Channel, closure: Closure, ran: Ran) -> None:
        try:
            result = closures.loads(ran.result, self._session.objects.resolve)
        except Exception as error:  # noqa: BLE001  (the user's own types are unpickled)
            self._queue.failed(channel, closure, error)
            return
        self._reports.add(ran.metrics)
        self._queue.done(channel, closure, result)

    def _close(self) -> None:
        """The script is over: workers and servers are told, also those workers that are still on their way here."""
        self._queue.close()
        until = time.monotonic() + _END_SECONDS
        while time.monotonic() < until and (self._coming() or self._serving_now()):
            time.sleep(_POLL_SECONDS)
        self._session.servers.shutdown()

    def _coming(self) -> bool:
        return self._made is not None and len(self._seen) < self._workers

    def _serving_now(self) -> bool:
        return any(thread.is_alive() for thread in self._serving)
