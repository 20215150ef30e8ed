"""What ``fit`` and the others do under ``ParameterServerStrategy``.

::

    the user's call          chief                                                 worker
    fit(x, y, …)             Keras' own, with batches scheduled                    serves, until the job is over
    train_on_batch(x, y)     likewise                                              likewise
    evaluate, predict        Keras' own, here, with the servers' variables         Keras' own
    save, save_weights       with the servers' variables and optimizer state       nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import keras

from choros.distribute.coordinator.chief import Chief
from choros.distribute.coordinator.remote_value import RemoteValue
from choros.distribute.coordinator.role import Role
from choros.distribute.coordinator.worker import Worker
from choros.distribute.fit.call import KerasCall
from choros.distribute.fit.training import Training
from choros.distribute.parameter_server.optimizer import Pusher, lead
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.training_step import leading_function, train_on
from choros.distribute.scope import enter_fit
from choros.training.keras_internals import build_from_batch, pythonify_logs

__all__ = ["ChiefTraining", "WorkerTraining"]

#: Batches that wait or are trained on, for each worker: one at work, one at hand.
_BATCHES_PER_WORKER = 2


@final
class ChiefTraining(Training):
    """The chief's: it leads.

    Args:
        chief: schedules batches.
        workers: how many there are.
    """

    def __init__(self, chief: Chief, workers: int) -> None:
        self._chief = chief
        self._limit = _BATCHES_PER_WORKER * workers

    def variable_created(self, variable: Any) -> None:
        """Nothing: its model is published when it is complete."""

    def optimizer_created(self, optimizer: Any) -> None:
        """The servers will apply its gradients."""
        _note_optimizer(optimizer, self._chief, self._chief.session.objects, leads=True)

    def model_created(self, model: Any) -> None:
        """Gives it a number."""
        self._chief.session.objects.add(model)

    def metric_created(self, metric: Any) -> None:
        """Gives it a number."""
        self._chief.session.objects.add_metric(metric)

    def checkpoint_created(self, checkpoint: Any) -> None:
        """Nothing: when no function runs, models and optimizers here have the servers' variables."""

    def checkpoint_manager_created(self, manager: Any) -> None:
        """Nothing."""

    def compile(self, model: Any, call: KerasCall) -> None:
        """Keras' own."""
        del model
        call.run()

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Keras' own loop, whose batches workers train on."""
        with enter_fit(), _led(model, self._chief, self._limit):
            return call.run()

    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """A worker does."""
        with enter_fit(), _led(model, self._chief, self._limit):
            logs = call.run()
            self._chief.join()
            return logs

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Here, with the servers' variables."""
        del model
        self._chief.refresh()
        return call.run()

    predict = evaluate
    test_on_batch = evaluate
    predict_on_batch = evaluate

    def save(self, model: Any, call: KerasCall) -> None:
        """Here, with the servers' variables."""
        del model
        self._chief.refresh()
        call.run()

    save_weights = save
    export = save


@final
class WorkerTraining(Training):
    """A worker's: it serves.

    Args:
        worker: does that.
        objects: what was made in the scope.
    """

    def __init__(self, worker: Worker, objects: ScopeObjects) -> None:
        self._worker = worker
        self._objects = objects

    def variable_created(self, variable: Any) -> None:
        """Nothing: it gets the servers' value when it is needed."""

    def optimizer_created(self, optimizer: Any) -> None:
        """The servers will apply its gradients."""
        _note_optimizer(optimizer, self._worker, self._objects, leads=False)

    def model_created(self, model: Any) -> None:
        """Gives it a number."""
        self._objects.add(model)

    def metric_created(self, metric: Any) -> None:
        """Gives it a number."""
        self._objects.add_metric(metric)

    def checkpoint_created(self, checkpoint: Any) -> None:
        """Nothing: scripts save when they have trained."""

    def checkpoint_manager_created(self, manager: Any) -> None:
        """Nothing."""

    def compile(self, model: Any, call: KerasCall) -> None:
        """Keras' own."""
        del model
        call.run()

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Serves the chief, and never comes back."""
        del model, call
        self._worker.serve()

    train_on_batch = fit

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Keras' own: only scripts that evaluate before they train come here."""
        del model
        return call.run()

    predict = evaluate
    test_on_batch = evaluate
    predict_on_batch = evaluate

    def save(self, model: Any, call: KerasCall) -> None:
        """Nothing: the chief writes."""

    save_weights = save
    export = save


def _note_optimizer(optimizer: Any, role: Role, objects: ScopeObjects, *, leads: bool) -> None:
    number = objects.add(optimizer)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # The servers apply what is inside of it.
        pusher = Pusher(optimizer, number, lambda: role.session, leads=leads)
        lead(optimizer, pusher)
        if pusher.slots is not None:
            objects.add_slots(number, pusher.slots)


@contextmanager
def _led(model: Any, chief: Chief, limit: int) -> Iterator[None]:
    """The block in which this model's training function schedules batches, and its metrics wait for all of them."""
    leader = _Leader(model, chief, limit)
    replaced: dict[str, Callable[..., Any]] = {
        "train_function": leading_function(model, leader.lead),
        "make_train_function": lambda *_, **__: None,
        "get_metrics_result": leader.results_of_epoch,
    }
    kept = {name: model.__dict__[name] for name in replaced if name in model.__dict__}
    for name, function in replaced.items():
        # Past Keras' attribute tracking: this is no part of the model.
        object.__setattr__(model, name, function)
    try:
        yield
    finally:
        for name in replaced:
            object.__delattr__(model, name)
        for name, function in kept.items():
            object.__setattr__(model, name, function)


@final
class _Leader:
    def __init__(self, model: Any, chief: Chief, limit: int) -> None:
        self._model = model
        self._chief = chief
        self._limit = limit
        self._results = model.get_metrics_result
        self._under_way: deque[RemoteValue] = deque()
        self._logs: dict[str, Any] = {}

    def lead(self, batch: Any) -> dict[str, Any]:
        """Schedules a batch; returns what is known of those before it, and waits only if nothing is."""
        build_from_batch(self._model, batch)
        arguments = (self._chief.session, self._model, batch)
        self._under_way.append(self._chief.schedule(train_on, arguments, {}, self._limit))
        own: dict[str, Any] = {}
        while self._under_way and (self._under_way[0].ready or not (own or self._logs)):
            try:
                own = self._under_way.popleft().get()
            except Exception:
                self._chief.join()  # It raises the same, and clears it.
                raise
        if own:
            self._chief.settle_metrics()
            counted = dict(pythonify_logs(self._results()))
            # A model's own train_step may return other things than its metrics.
            self._logs = counted if counted.keys() == own.keys() else own
        return self._logs

    def results_of_epoch(self) -> Any:
        """The model's metrics, when all batches are done; the model has the servers' variables then."""
        self._chief.join()
        return self._results()
