"""The chief: sends closures to the workers, collects their results, and shuts all processes down at the end. Workers
that have not run the script so far lack objects, of which it sends definitions::

    schedule(step, args) ─► pickled ─► refers to a model ─► its definition ─► refers to its optimizer ─► …
                                                                 │
    worker that serves ◄── Run(…, those it does not have) ───────┘
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import pickle
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, final

import keras

from choros import durations
from choros.distribute.training import KerasCall
from choros.errors import ConfigError, EngineError
from choros.parameter_server import closures
from choros.parameter_server.cluster import Cluster, TaskConnection, wait_for_end
from choros.parameter_server.messages import Definition, Joined, Ran, Reference, Report, Run
from choros.parameter_server.optimizer import remote_optimizers
from choros.parameter_server.placement import Partition, VariableKey
from choros.parameter_server.queue import (
    Clocks,
    Closure,
    ClosureQueue,
    PerWorkerValues,
    RemoteValue,
    WorkerTimes,
)
from choros.parameter_server.scope_objects import ScopeObjects, layers_in_order
from choros.parameter_server.session import ServerSession
from choros.training.keras_internals.models import trained_variables
from choros.transport.channel import ChannelClosed, Failure

_log = logging.getLogger(__name__)


@final
class Chief:
    """The chief's role; while closures wait or run, current variables are on the servers, otherwise in its models: the
    first closure after a pause publishes what changed here, and the last one's end pulls what changed there.
    """

    serving = False

    def __init__(self, cluster: Cluster, partition: Partition | None, max_staleness: int | None) -> None:
        self.strategy: Any = None
        self.workers = len(cluster.tasks["worker"])
        self._cluster = cluster
        self._job = secrets.token_hex(8)
        self.objects = ScopeObjects()
        servers = cluster.servers(self._job)
        # A server that has replied knows the job; a worker that heard of it before may be there first.
        servers.request("pull", dict.fromkeys(range(len(servers)), (0, False)))
        self.session = ServerSession(self.objects, servers, partition=partition)
        self._queue = ClosureQueue(Clocks(max_staleness), cluster.start_seconds)
        self._reports: list[Report] = []
        self._definitions = Definitions(self.session, self._reference)
        self._times = WorkerTimes()
        self._times_due = time.monotonic() + durations.WORKERS_COMPARED
        self._lock = threading.Lock()
        self._used = False
        self._flushed = True
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True) for index in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def chief(self) -> Chief:
        """Returns itself; a worker serves it instead."""
        return self

    def schedule(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], limit: int
    ) -> Future[Any]:
        """Schedules ``function`` on a worker; blocks at ``limit`` open closures; raises an earlier closure's error."""
        self._used = True
        self.session.publish(running=not self._flushed)
        pickled, uses = self._definitions.dumps(function)
        arguments, also = self._definitions.dumps((tuple(args), dict(kwargs)))
        key = hashlib.sha256(pickled).digest()
        placed = {reference for reference in self.objects.revisions if reference[0] == "placed"}
        definitions = (*self._definitions.of(uses | also | placed), Definition(("function", key), 0, pickled))
        rates = {number: remote.learning_rate for number, remote in remote_optimizers(self.objects).items()}
        learning_rates = {number: rate for number, rate in rates.items() if rate is not None}
        closure = Closure(closures.name_of(function), key, arguments, learning_rates, definitions)
        self._flushed = False
        with self._flushed_after_error():
            self._queue.put(closure, limit)
        return closure.result

    def result_of(self, scheduled: Future[Any]) -> Any:
        """Waits for what ``schedule`` has returned; raises its error, or EngineError if no worker is connected."""
        return self._queue.result_of(scheduled)

    def join(self) -> None:
        """Waits for all closures; afterwards this process has their metrics and the servers' variables."""
        with self._flushed_after_error():
            self._queue.wait()
        self._flush()

    def done(self) -> bool:
        """Returns whether all closures are done; if so, the state is that after ``join``."""
        with self._flushed_after_error():
            is_idle = self._queue.idle
        if not is_idle:
            return False
        self._flush()
        return True

    def flush_metrics(self) -> None:
        """Adds the workers' metric reports so far to the chief's metrics."""
        with self._lock:
            reports, self._reports = self._reports, []
        for report in reports:
            self.objects.add_metrics(report)

    @contextmanager
    def _flushed_after_error(self) -> Iterator[None]:
        """The queue raises a closure's error when none runs: what is built after it is to be published, too."""
        try:
            yield
        except Exception:
            self._flush()
            raise

    def _flush(self) -> None:
        if not self._flushed:
            self._flushed = True
            self.flush_metrics()
            self.session.synchronize()

    def _reference(self, item: Any) -> Reference | None:
        if isinstance(item, RemoteValue):
            raise ConfigError(
                "a RemoteValue was passed to schedule(): pass its value, remote_value.get(), or do both steps in one "
                "function."
            )
        if isinstance(item, PerWorkerValues):
            return ("per_worker", item.dataset, item.iterator)
        if item is self.session or item is self.strategy:
            return ("session",) if item is self.session else ("strategy",)
        return self.objects.reference(item)

    def _serve(self, index: int) -> None:
        """Connects to a worker whenever it listens, and sends closures to it, in a thread of its own."""
        while not self._ending.is_set():
            try:
                worker = self._cluster.connect("worker", index, "a function on", durations.WORKER_CONNECT)
            except EngineError as error:
                self._queue.refused(str(error))
            else:
                try:
                    self._work(worker)
                except ChannelClosed as error:
                    self._queue.refused(str(error))
                    _log.warning("%s is lost; another worker runs its function again", worker.peer)
                else:
                    return
            time.sleep(durations.WORKERS_LOOK)

    def _work(self, worker: TaskConnection) -> None:
        """Sends closures to a worker until the queue is closed."""
        worker.send(self._job)
        joined: Joined | Failure = worker.receive()
        if isinstance(joined, Failure):
            worker.close()
            raise ChannelClosed(f"{worker.peer} could not join: {joined.error()}")
        kinds, known = joined[0], dict(joined[1])
        self._queue.add_worker()
        try:
            while (closure := self._queue.take(worker)) is not None:
                try:
                    reply = self._run(worker, kinds, closure, known)
                except ChannelClosed:
                    self._queue.lost(worker.peer, closure)
                    raise
                if isinstance(reply, Failure):
                    self._queue.failed(worker, closure, reply.error())
                else:
                    self._finish(worker, closure, reply)
            worker.send(None)
        finally:
            self._queue.remove_worker(worker)

    def _run(
        self, worker: TaskConnection, kinds: tuple[str, ...], closure: Closure, known: dict[Reference, int]
    ) -> Ran | Failure:
        own = self.objects.kinds[: len(kinds)]
        if kinds != own:
            return Failure.of(
                ConfigError(
                    f"{worker.peer} has created {', '.join(kinds)} in the scope, the chief "
                    f"{', '.join(own) or 'nothing'}: workers must run the same script as the chief up to the first "
                    "schedule() or fit(), or serve from the beginning with distribute.Server."
                )
            )
        definitions = [each for each in closure.definitions if known.get(each.reference, -1) < each.revision]
        for definition in definitions:
            if definition.error:
                return Failure.of(ConfigError(self._not_sent(closure, worker, definition)))
        run: Run = closure.function, pickle.PickleBuffer(closure.arguments), closure.learning_rates, definitions
        worker.send(run)
        reply: Ran | Failure = worker.receive()
        if not isinstance(reply, Failure):
            known.update({each.reference: each.revision for each in definitions})
        return reply

    def _not_sent(self, closure: Closure, worker: TaskConnection, definition: Definition) -> str:
        tag, number = definition.reference
        if tag == "dataset":
            item = f"data set {number} of create_per_worker_dataset()"
        else:
            of = self.objects.resolve(("created" if tag == "compiled" else tag, number))
            item = f"the {type(of).__name__} {getattr(of, 'name', '')!r}"
        return (
            f"{closure.name} uses {item}, which {worker.peer} does not have and cannot be sent ({definition.error}): "
            "create it before the first schedule() or fit(), up to which workers run the script, or so that Keras can "
            "save it."
        )

    def _finish(self, worker: TaskConnection, closure: Closure, ran: Ran) -> None:
        pickled, metrics, seconds, waiting = ran
        try:
            result = closures.loads(pickled, self.objects.resolve)
        except Exception as error:  # noqa: BLE001  (the user's own types are unpickled)
            self._queue.failed(worker, closure, error)
            return
        with self._lock:
            self._reports.append(metrics)
        self._queue.done(worker, closure, result)
        with self._lock:
            self._times.note(worker.peer, closure.name, seconds, waiting)
            if time.monotonic() >= self._times_due:
                self._compare_workers()

    def _compare_workers(self) -> None:
        self._times_due = time.monotonic() + durations.WORKERS_COMPARED
        if sentence := self._times.sentence():
            _log.warning("%s.", sentence)

    def close(self) -> None:
        """Shuts down workers and servers, also those not listening yet; waits for those that are threads here."""
        atexit.unregister(self.close)
        if lost := self._queue.close():
            _log.error("the chief ends: %s", lost)
        deadline = time.monotonic() + (durations.WORKERS_END if self._used else durations.WORKER_CONNECT)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._ending.set()
        with self._lock:
            self._compare_workers()
        self.session.servers.shutdown()
        wait_for_end(self._job)


@final
class Definitions:
    """The definitions of a job, each made when a scheduled function first refers to it."""

    def __init__(self, session: ServerSession, reference: Callable[[Any], Reference | None]) -> None:
        self._session = session
        self._objects = session.objects
        self._reference = reference
        self._made: dict[Reference, tuple[Definition, frozenset[Reference]]] = {}

    def dumps(self, item: Any) -> tuple[bytes, frozenset[Reference]]:
        """Pickles ``item``; returns the references in it as well."""
        return self._dumps(item, self._reference)

    def of(self, references: Iterable[Reference]) -> tuple[Definition, ...]:
        """Returns the definitions of what ``references`` refer to, each after those that it needs."""
        ordered: dict[Reference, Definition | None] = {}
        waiting = set(references)
        while waiting:
            for reference in sorted(waiting):
                self._add(reference, ordered)
            waiting = {also for reference in ordered for also in self._also(reference)} - ordered.keys()
        return tuple(each for each in ordered.values() if each is not None)

    def _add(self, reference: Reference, ordered: dict[Reference, Definition | None]) -> None:
        if reference in ordered:
            return
        ordered[reference] = None  # it may refer to itself
        definition, needs = self._definition(reference)
        for need in sorted(needs):
            self._add(need, ordered)
        del ordered[reference]
        ordered[reference] = definition

    def _also(self, reference: Reference) -> set[Reference]:
        """What a worker is to have besides, when it has the rest: how a model is compiled, or an optimizer's models."""
        tag, number = reference
        if tag != "created":
            return set()
        if ("compiled", number) in self._objects.revisions:
            return {("compiled", number)}
        item = self._objects.resolve(reference)
        keys = self._trained_by(item) if isinstance(item, keras.optimizers.Optimizer) else ()
        return {("created", key[0]) for key in keys if isinstance(key, tuple)}

    def _trained_by(self, optimizer: Any) -> tuple[VariableKey, ...]:
        return self._session.keys_of(trained_variables(optimizer))

    def _definition(self, reference: Reference) -> tuple[Definition, frozenset[Reference]]:
        revision = self._objects.revisions.get(reference, 0)
        made = self._made.get(reference)
        if made is None or made[0].revision < revision:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Keras': of lambdas in configurations
                    pickled, needs = self._pickle(reference)
                made = Definition(reference, revision, pickled), needs
            except Exception as error:  # noqa: BLE001  (a user's get_config may raise anything; most workers need none)
                made = Definition(reference, revision, b"", str(error)), frozenset()
            self._made[reference] = made
        return made

    def _pickle(self, reference: Reference) -> tuple[bytes, frozenset[Reference]]:
        tag, number = reference
        item = self._objects.resolve(reference)
        if tag in ("dataset", "placed"):
            return self.dumps(item)
        if tag == "compiled":
            return self.dumps(self._compile_arguments(number, item))
        if tag == "metric":
            return self._dumps(item, lambda part: None if part is item else self._reference(part))
        return self._created(item)

    def _compile_arguments(self, number: int, call: KerasCall) -> tuple[Any, ...]:
        """Returns what ``compile_copy`` takes; an optimizer's name is replaced by the optimizer created."""
        model = self._objects.resolve(("created", number))
        if call.get("optimizer") is not None and getattr(model, "optimizer", None) is not None:
            call = call.replaced(optimizer=model.optimizer)
        return call.bound.args, call.bound.kwargs, tuple(layer.trainable for layer in layers_in_order(model))

    def _created(self, item: Any) -> tuple[bytes, frozenset[Reference]]:
        """Pickles a model; or an optimizer, its variables without weight decay and, if it is built, all of them."""
        if isinstance(item, keras.optimizers.Optimizer):
            created = item, (self._session.undecayed(item), self._trained_by(item))
            return self._dumps(created, lambda part: None if part is item else self._reference(part))
        shared = self._objects.shared_layers(item)

        def reference(part: Any) -> Reference | None:
            if isinstance(part, (keras.Layer, keras.Variable)):
                return shared.get(id(part))
            return self._reference(part)

        return self._dumps(item, reference)

    def _dumps(self, item: Any, reference: Callable[[Any], Reference | None]) -> tuple[bytes, frozenset[Reference]]:
        found: set[Reference] = set()

        def collecting(part: Any) -> Reference | None:
            result = reference(part)
            if result is not None:
                match result:
                    case ("part", number, *_):
                        found.add(("created", number))
                    case ("per_worker", dataset, _):
                        found.add(("dataset", dataset))
                    case ("created" | "metric", _):
                        found.add(result)
            return result

        return closures.dumps(item, collecting), frozenset(found)
