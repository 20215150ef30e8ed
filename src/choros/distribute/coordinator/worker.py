"""The worker: runs the functions that the chief sends, until the job ends."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, final

from choros.distribute.coordinator import closures
from choros.distribute.coordinator.messages import Ran, Run
from choros.distribute.coordinator.metrics import count_metrics, reset_metrics
from choros.distribute.coordinator.remote_value import PerWorkerDataset, RemoteValue
from choros.distribute.coordinator.role import CoordinatorRole
from choros.distribute.parameter_server.cluster import CHIEF, Cluster
from choros.distribute.parameter_server.messages import Hello, Shutdown
from choros.distribute.parameter_server.optimizer import remote_optimizers
from choros.distribute.parameter_server.placement import Partition
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.session import ServerSession
from choros.distribute.parameter_server.signals import leave_signals_to_the_chief
from choros.errors import EngineError, StrategyError
from choros.observe import events
from choros.observe.events import Kind
from choros.transport.channel import ChannelClosed
from choros.transport.remote_errors import Failure

__all__ = ["Worker"]


@final
class Worker(CoordinatorRole):
    """A worker's role.

    Args:
        strategy: the job's strategy.
        objects: the objects created in the scope.
        cluster: the job's processes.
        partition: the strategy's ``variable_partitioner``.
    """

    def __init__(self, strategy: Any, objects: ScopeObjects, cluster: Cluster, partition: Partition | None) -> None:
        self._strategy = strategy
        self._objects = objects
        self._cluster = cluster
        self._partition = partition
        self._session: ServerSession | None = None
        self._functions: dict[bytes, Callable[..., Any]] = {}
        self._datasets: list[Any] = []
        self._iterators: dict[tuple[int, int], Iterator[Any]] = {}

    @property
    def session(self) -> ServerSession:
        """The server session; available while this worker serves."""
        if self._session is None:
            raise StrategyError(
                "an optimizer created in the scope of ParameterServerStrategy was applied outside fit() and outside "
                "functions passed to ClusterCoordinator.schedule(): only there can workers reach the variables."
            )
        return self._session

    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
    ) -> RemoteValue:
        """Serves the chief; never returns."""
        del function, args, kwargs, limit
        self.serve()

    def join(self) -> None:
        """Serves the chief; never returns."""
        self.serve()

    def done(self) -> bool:
        """Serves the chief; never returns."""
        self.serve()

    def dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Keeps ``dataset_fn`` until the chief sends a function that uses the data set."""
        self._datasets.append(dataset_fn)
        return PerWorkerDataset(len(self._datasets) - 1)

    def serve(self) -> NoReturn:
        """Runs the functions that the chief sends.

        Raises:
            SystemExit: with code 0 when the job has ended.
            EngineError: the chief or a server cannot be reached, or the chief's connection closed before the job ended.
        """
        leave_signals_to_the_chief()
        hello = Hello(self._objects.kinds)
        chief = self._cluster.connect(self._cluster.chief, CHIEF)
        try:
            chief.send(hello)
            self._session = ServerSession(self._objects, self._cluster.servers(hello), self._partition)
            for remote in remote_optimizers(self._objects).values():
                remote.prepare()
            while not isinstance(message := chief.receive(), Shutdown):
                chief.send(self._reply(message))
        except ChannelClosed as error:
            raise EngineError(
                "the connection to the chief closed before the job ended: see the chief's output."
            ) from error
        raise SystemExit(0)

    def _reply(self, message: Run) -> Ran | Failure:
        session = self.session
        try:
            function = self._function(message)
            args, kwargs = closures.loads(message.arguments, self._resolve)
            for number, remote in remote_optimizers(self._objects).items():
                if number in message.learning_rates:
                    remote.learning_rate = message.learning_rates[number]
            session.pull()
            reset_metrics(self._objects)
            name = getattr(function, "__name__", type(function).__name__)
            with events.span(Kind.STEP_BEGUN, Kind.STEP_DONE, name):
                result = function(*args, **kwargs)
            session.push_statistics()
            pickled = pickle.PickleBuffer(closures.dumps(result, self._objects.reference))
            return Ran(pickled, count_metrics(self._objects))
        except Exception as error:  # noqa: BLE001  (every error of a function is reported to the chief)
            cause, session.servers.failure = session.servers.failure, None
            return Failure.of(cause or error)

    def _function(self, message: Run) -> Callable[..., Any]:
        if message.function is not None:
            self._functions[message.key] = closures.loads(message.function, self._resolve)
        return self._functions[message.key]

    def _resolve(self, reference: closures.Reference) -> Any:
        match reference:
            case ("session",):
                return self._session
            case ("strategy",):
                return self._strategy
            case ("per_worker", int(dataset), int(iterator)):
                return self._iterator(dataset, iterator)
            case _:
                return self._objects.resolve(reference)

    def _iterator(self, dataset: int, number: int) -> Iterator[Any]:
        if dataset >= len(self._datasets):
            raise StrategyError(
                f"a scheduled function uses data set {dataset}, but this worker has {len(self._datasets)}: call "
                "create_per_worker_dataset() before the first schedule(), because workers run the script up to there."
            )
        if (dataset, number) not in self._iterators:
            dataset_fn = self._datasets[dataset]
            dataset_fn = getattr(dataset_fn, "python_function", dataset_fn)
            self._iterators[dataset, number] = iter(dataset_fn() if callable(dataset_fn) else dataset_fn)
        return self._iterators[dataset, number]
