"""``fit``, ``evaluate``, ``save`` and the other Keras methods under ``ParameterServerStrategy``.

::

    the user's call          chief                                                 worker
    fit(x, y, …)             Keras' own, with batches scheduled                    serves until the job ends
    train_on_batch(x, y)     the same                                              the same
    evaluate, predict        Keras' own, with the servers' variables               Keras' own
    save                     with the servers' variables and optimizer state       nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from choros.distribute.coordinator.chief import Chief
from choros.distribute.coordinator.remote_value import RemoteValue
from choros.distribute.coordinator.worker import Worker
from choros.distribute.fit.call import KerasCall
from choros.distribute.fit.training import Training
from choros.distribute.parameter_server.optimizer import add_remote_optimizer
from choros.distribute.parameter_server.training_step import coordinated_train_function, train_on
from choros.distribute.scope import enter_fit, in_fit
from choros.training.keras_internals import build_from_batch, pythonify_logs

__all__ = ["ChiefTraining", "WorkerTraining"]

#: Scheduled batches per worker: one being trained on, one waiting.
_BATCHES_PER_WORKER = 2


@final
class ChiefTraining(Training):
    """The chief's training: schedules batches on the workers.

    Args:
        chief: schedules the batches.
        workers: the number of workers.
    """

    def __init__(self, chief: Chief, workers: int) -> None:
        self._chief = chief
        self._limit = _BATCHES_PER_WORKER * workers

    def variable_created(self, variable: Any) -> None:
        """Does nothing: the variables of a model are published once it is built."""

    def optimizer_created(self, optimizer: Any) -> None:
        """Patches the optimizer: the servers apply its gradients."""
        objects = self._chief.session.objects
        number = objects.add(optimizer)
        remote = add_remote_optimizer(optimizer, number, lambda: self._chief.session, is_chief=True)
        if remote is not None and remote.slots is not None:
            objects.add_slots(number, remote.slots)

    def model_created(self, model: Any) -> None:
        """Adds it to the objects of the scope."""
        self._chief.session.objects.add(model)

    def metric_created(self, metric: Any) -> None:
        """Adds it to the objects of the scope."""
        if not in_fit():  # Keras' own, which belong to the model
            self._chief.session.objects.add_metric(metric)

    def compile(self, model: Any, call: KerasCall) -> None:
        """Keras' own ``compile``; workers compile their copies in the same way."""
        call.run()
        self._chief.session.objects.add_compile(model, call)

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Keras' own loop, with its batches scheduled on the workers."""
        with enter_fit(), _coordinated(model, self._chief, self._limit):
            return call.run()

    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Trains on the batch on a worker, and waits for it."""
        with enter_fit(), _coordinated(model, self._chief, self._limit):
            logs = call.run()
            self._chief.join()
            return logs

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Runs on the chief, with the servers' variables."""
        del model
        self._chief.refresh()
        return call.run()

    predict = evaluate
    test_on_batch = evaluate
    predict_on_batch = evaluate

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Writes on the chief, with the servers' variables."""
        self._chief.refresh()
        return write()


@final
class WorkerTraining(Training):
    """A worker's training: serves the chief.

    Args:
        worker: serves the chief.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def variable_created(self, variable: Any) -> None:
        """Does nothing: the servers' value is pulled before each function."""

    def optimizer_created(self, optimizer: Any) -> None:
        """Patches the optimizer: the servers apply its gradients."""
        if not self._worker.serving:
            number = self._worker.objects.add(optimizer)
            add_remote_optimizer(optimizer, number, lambda: self._worker.session)

    def model_created(self, model: Any) -> None:
        """Adds it to the objects of the scope."""
        if not self._worker.serving:
            self._worker.objects.add(model)

    def metric_created(self, metric: Any) -> None:
        """Adds it to the objects of the scope."""
        if not self._worker.serving:
            self._worker.objects.add_metric(metric)

    def compile(self, model: Any, call: KerasCall) -> None:
        """Keras' own ``compile``."""
        call.run()
        if not self._worker.serving:
            self._worker.objects.add_compile(model, call)

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Serves the chief; never returns."""
        del model, call
        self._worker.serve()

    train_on_batch = fit

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Keras' own: only scripts that evaluate before training reach this."""
        del model
        return call.run()

    predict = evaluate
    test_on_batch = evaluate
    predict_on_batch = evaluate

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Does nothing: the chief writes the files."""


@contextmanager
def _coordinated(model: Any, chief: Chief, limit: int) -> Iterator[None]:
    """Within this block, the model's training function schedules batches, and its metrics wait for all of them."""
    training = _CoordinatedTraining(model, chief, limit)
    replaced: dict[str, Callable[..., Any]] = {
        "train_function": coordinated_train_function(model, training.schedule),
        "make_train_function": lambda *_, **__: None,
        "get_metrics_result": training.epoch_results,
    }
    saved = {name: model.__dict__[name] for name in replaced if name in model.__dict__}
    for name, function in replaced.items():
        # Bypasses Keras' attribute tracking: this is not part of the model.
        object.__setattr__(model, name, function)
    try:
        yield
    finally:
        for name in replaced:
            object.__delattr__(model, name)
        for name, function in saved.items():
            object.__setattr__(model, name, function)


@final
class _CoordinatedTraining:
    def __init__(self, model: Any, chief: Chief, limit: int) -> None:
        self._model = model
        self._chief = chief
        self._limit = limit
        self._results = model.get_metrics_result
        self._pending: deque[RemoteValue] = deque()
        self._logs: dict[str, Any] = {}

    def schedule(self, batch: Any) -> dict[str, Any]:
        """Schedules a batch; returns the latest logs, and waits only if there are none yet."""
        build_from_batch(self._model, batch)
        arguments = (self._chief.session, self._model, batch)
        self._pending.append(self._chief.schedule(train_on, arguments, {}, self._limit))
        latest: dict[str, Any] = {}
        while self._pending and (self._pending[0].ready or not (latest or self._logs)):
            try:
                latest = self._pending.popleft().get()
            except Exception:
                self._chief.join()  # Raises the same error and clears it.
                raise
        if latest:
            self._chief.flush_metrics()
            metrics = dict(pythonify_logs(self._results()))
            # A custom train_step may return other values than the model's metrics.
            self._logs = metrics if metrics.keys() == latest.keys() else latest
        return self._logs

    def epoch_results(self) -> Any:
        """Waits for all batches and returns the model's metrics; the model then has the servers' variables."""
        self._chief.join()
        return self._results()
