"""The worker: runs the functions that the chief sends, until the job ends."""

import pickle
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, Queue
from typing import Any, NoReturn, final

import keras

from choros.errors import StrategyError
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.progress import page
from choros.parameter_server import closures
from choros.parameter_server.cluster import Cluster, chief_lost, leave_signals_to_the_chief, wait_for_chief
from choros.parameter_server.messages import Definition, Joined, Ran, Reference, Run
from choros.parameter_server.optimizer import add_remote_optimizer, remote_optimizers
from choros.parameter_server.recipes import compile_copy
from choros.parameter_server.scope_objects import ScopeObjects
from choros.parameter_server.session import ServerSession
from choros.transport.channel import Channel, ChannelClosed, Failure


@final
class Worker:
    """A worker's role; once ``serving``, as a chief has connected, only the chief adds objects."""

    def __init__(self, cluster: Cluster, exclusive: AbstractContextManager[Any] | None = None) -> None:
        self.strategy: Any = None
        self.objects = ScopeObjects()
        self.serving = False
        self._cluster = cluster
        self._exclusive = exclusive or nullcontext()
        self._session: ServerSession | None = None
        self._iterators: dict[tuple[int, int], Iterator[Any]] = {}
        if keras.backend.backend() == "jax":
            from choros.arrays.jax_arrays import spare_xla_thread

            spare_xla_thread()

    @property
    def session(self) -> ServerSession:
        """The server session; available while this worker serves."""
        if self._session is None:
            raise StrategyError(
                "an optimizer created in the scope of ParameterServerStrategy was applied outside fit() and outside "
                "functions passed to ClusterCoordinator.schedule(): only there can workers reach the variables."
            )
        return self._session

    def chief(self) -> NoReturn:
        """Runs the functions that the chief sends; exits with code 0 when the job has ended."""
        if self.serving:
            raise StrategyError(
                "fit(), train_on_batch() or schedule() was called in a function that a worker runs: they send "
                "functions to workers, which only the chief does. Call them there, or let the function compute "
                "gradients itself and pass them to optimizer.apply()."
            )
        leave_signals_to_the_chief()
        arrivals: Queue[tuple[Channel, str]] = Queue()
        # Functions run in this thread, which has the script's settings.
        listener = self._cluster.listen(lambda *arrival: arrivals.put(arrival))

        def arrival(seconds: float) -> tuple[Channel, str] | None:
            with suppress(Empty):
                return arrivals.get(timeout=seconds)
            return None

        channel, job = wait_for_chief(arrival, self._cluster, listener)
        listener.close()
        self.run(channel, job)
        raise SystemExit(0)

    def run(self, chief: Channel, job: str) -> None:
        """Runs the functions that the chief sends, until the job has ended."""
        self.serving = True
        try:
            self._join(chief, job)
            while (message := chief.receive()) is not None:
                with self._exclusive:
                    reply = self._reply(message)
                chief.send(reply)
        except ChannelClosed as error:
            raise chief_lost() from error

    def _join(self, chief: Channel, job: str) -> None:
        try:
            self._session = ServerSession(self.objects, self._cluster.servers(job), worker=self._cluster.index)
        except Exception as error:
            chief.send(Failure.of(error))
            raise
        for remote in remote_optimizers(self.objects).values():
            remote.prepare()
        joined: Joined = self.objects.kinds, self.objects.revisions
        chief.send(joined)

    def _reply(self, message: Run) -> Ran | Failure:
        session = self.session
        key, pickled, learning_rates, definitions = message
        try:
            for definition in definitions:
                self._define(definition)
            function, captured = self.objects.resolve(("function", key))
            copies = captured.copy()
            args, kwargs = closures.loads(pickled, self._resolve, copies)
            for number, remote in remote_optimizers(self.objects).items():
                if number in learning_rates:
                    remote.learning_rate = learning_rates[number]
            began, waited = time.perf_counter(), page.waited
            session.servers.failure = None  # of an earlier function, which has caught it
            session.pull()
            for remote in remote_optimizers(self.objects).values():
                remote.count()
            self.objects.reset_metrics()
            name = getattr(function, "__name__", type(function).__name__)
            with events.span(Kind.STEP_BEGUN, Kind.STEP_DONE, name):
                result = function(*args, **kwargs)
            closures.check_unchanged(copies, name)
            session.push_assigned()
            times = time.perf_counter() - began, page.waited - waited
            pickled = pickle.PickleBuffer(closures.dumps(result, self.objects.reference))
            return pickled, self.objects.count_metrics(), *times
        except (Exception, SystemExit) as error:  # noqa: BLE001  (what ends a function, its sys.exit, too, is the chief's)
            cause, session.servers.failure = session.servers.failure, None
            if cause is None or str(cause) not in str(error):  # the function has caught it, if any
                return Failure.of(error)
            return Failure.of(cause)

    def _define(self, definition: Definition) -> None:
        reference, revision = definition.reference, definition.revision
        if self.objects.revisions.get(reference, -1) >= revision:
            return  # sent with a function that failed
        with self.strategy.scope():
            copies: list[closures.Copy] = []
            item = closures.loads(definition.pickled, self._resolve, copies)
            match reference:
                case ("function", _):
                    item = item, copies
                case ("compiled", number):
                    compile_copy(self.objects.resolve(("created", number)), *item)
                case ("created", number) if isinstance(item, tuple):
                    item, (undecayed, trained) = item
                    remote = add_remote_optimizer(
                        item, number, lambda: self.session, undecayed=undecayed, trained=trained
                    )
                    if remote:
                        remote.prepare()
            self.objects.put(reference, item, revision)

    def _resolve(self, reference: Reference) -> Any:
        match reference:
            case ("session",):
                return self._session
            case ("strategy",):
                return self.strategy
            case ("per_worker", int(dataset), int(iterator)):
                return self._iterator(dataset, iterator)
            case _:
                return self.objects.resolve(reference)

    def _iterator(self, dataset: int, number: int) -> Iterator[Any]:
        if (dataset, number) not in self._iterators:
            dataset_fn = self.objects.resolve(("dataset", dataset))
            self._iterators[dataset, number] = iter(dataset_fn() if callable(dataset_fn) else dataset_fn)
        return self._iterators[dataset, number]
