"""``fit``, ``evaluate``, ``save`` and the other Keras methods under ``ParameterServerStrategy``.

::

    the user's call          chief                                                 worker
    fit(x, y, …)             Keras' own, with batches scheduled                    serves until the job ends
    train_on_batch(x, y)     the same                                              the same
    evaluate, predict        Keras' own, with the servers' variables               Keras' own
    save                     with the servers' variables and optimizer state       nothing

Keras' own ``fit`` runs on the chief, with its training function replaced to take the next batches, as the framework's
``fit`` passes them, and to schedule ``train_on`` on a worker for each.
"""

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, final
from weakref import WeakSet

import keras

from choros.distribute.scope import enter_fit, in_fit
from choros.distribute.training import KerasCall, Training
from choros.parameter_server.chief import Chief
from choros.parameter_server.optimizer import add_remote_optimizer
from choros.parameter_server.session import ServerSession
from choros.parameter_server.worker import Worker
from choros.training.keras_internals.fit import jax_state, pythonify_logs
from choros.training.keras_internals.models import build_from_batch, overrides
from choros.training.replaced import replaced
from choros.training.thread import doing

#: Scheduled batches per worker: one being trained on, one waiting.
_BATCHES_PER_WORKER = 2


@final
class ServerTraining(Training):
    """The training of a chief or a worker: the objects of the scope are theirs, but a serving worker's are the chief's.
    Where a worker's methods never return, it serves the chief.
    """

    def __init__(self, role: Chief | Worker) -> None:
        self._role = role
        #: The models that have all that they train with, as they are compiled.
        self._built: WeakSet[Any] = WeakSet()

    def optimizer_created(self, optimizer: Any) -> None:
        """Patches the optimizer: the servers apply its gradients."""
        role = self._role
        if not role.serving:
            number = role.objects.add("created", optimizer)
            remote = add_remote_optimizer(optimizer, number, lambda: role.session, is_chief=isinstance(role, Chief))
            if remote is not None and remote.slots is not None:
                role.objects.slots[number] = remote.slots

    def model_created(self, model: Any) -> None:
        """Adds it to the objects of the scope."""
        if not self._role.serving:
            self._role.objects.add("created", model)

    def metric_created(self, metric: Any) -> None:
        """Adds it to the objects of the scope."""
        if not self._role.serving and not in_fit():  # Keras' own, which belong to the model
            self._role.objects.add("metric", metric)

    def compile(self, model: Any, call: KerasCall) -> None:
        """Keras' own ``compile``; workers compile their copies in the same way."""
        call.run()
        self._built.discard(model)
        if not self._role.serving:
            self._role.objects.add_compile(model, call)

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Keras' own loop, with its batches scheduled on the workers."""
        chief = self._role.chief()
        training = _CoordinatedTraining(model, chief, self._built)
        attributes = {
            "train_function": training.train_function(),
            "make_train_function": lambda *_, **__: None,
            "get_metrics_result": training.after_batches(model.get_metrics_result),
            "make_test_function": training.after_batches(model.make_test_function),  # callbacks may evaluate
            "make_predict_function": training.after_batches(model.make_predict_function),
        }
        if keras.backend.backend() == "jax":
            # It gives variables their values back: nothing that the user assigns.
            attributes["jax_state_sync"] = doing("receiving_values")(model.jax_state_sync)
        with enter_fit(), replaced(model, **attributes):
            return call.run()

    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Trains on the batch on a worker, and waits for it."""
        logs = self.fit(model, call)
        self._role.chief().join()
        return logs

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Runs on the chief, with the servers' variables; on a worker only before training."""
        del model
        if isinstance(self._role, Chief):
            self._role.session.synchronize()
        # JAX gives the variables their values back.
        with doing("receiving_values") if keras.backend.backend() == "jax" else nullcontext():
            return call.run()

    predict = evaluate
    test_on_batch = evaluate
    predict_on_batch = evaluate

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Writes on the chief, with the servers' variables."""
        del path
        if isinstance(self._role, Chief):
            self._role.session.synchronize()
            return write()
        return None


@final
class _CoordinatedTraining:
    """A model's training: its function schedules batches, and its metrics wait for all of them."""

    def __init__(self, model: Any, chief: Chief, built: WeakSet[Any]) -> None:
        self._model = model
        self._built = built
        self._chief = chief
        self._results = model.get_metrics_result
        self._pending: deque[Future[Any]] = deque()
        self._logs: dict[str, Any] = {}

    def train_function(self) -> Callable[..., Any]:
        """Returns the function that replaces the model's training function."""
        model, steps = self._model, self._model.steps_per_execution

        def from_batches(batches: Any) -> dict[str, Any]:
            iterator = iter(batches)  # on PyTorch, they are a list
            logs = self._schedule(next(iterator))
            for batch in itertools.islice(iterator, steps - 1):
                logs = self._schedule(batch)
            return logs

        def with_state(state: Any, batches: Any) -> tuple[dict[str, Any], Any]:
            # Keras moves the values out of the model's variables during training; the chief needs them there.
            with doing("receiving_values"):
                _assign(model, state)
            logs = from_batches(batches)
            return logs, jax_state(model)

        return with_state if keras.backend.backend() == "jax" else from_batches

    def after_batches(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method of the model that waits for all batches; the model then has the servers' variables."""

        def waiting(*args: Any, **kwargs: Any) -> Any:
            self._chief.join()
            return method(*args, **kwargs)

        return waiting

    def _schedule(self, batch: Any) -> dict[str, Any]:
        """Schedules a batch; returns the latest logs, and waits only if there are none yet."""
        if self._model not in self._built:
            _build(self._model, batch)
            self._built.add(self._model)
        arguments = (self._chief.session, self._model, batch)
        limit = _BATCHES_PER_WORKER * self._chief.workers
        self._pending.append(self._chief.schedule(train_on, arguments, {}, limit))
        latest: dict[str, Any] = {}
        while self._pending and (self._pending[0].done() or not (latest or self._logs)):
            try:
                latest = self._chief.result_of(self._pending.popleft())
            except Exception:
                self._chief.join()  # Raises the same error and clears it.
                raise
        if latest:
            self._chief.flush_metrics()
            metrics = dict(pythonify_logs(self._results()))
            # A custom train_step may return other values than the model's metrics.
            self._logs = metrics if metrics.keys() == latest.keys() else latest
        return self._logs


def train_on(session: ServerSession, model: Any, batch: Any) -> dict[str, float]:
    """On a worker: runs Keras' own training step; returns its logs."""
    if model.train_function is None:  # since it was compiled
        _build(model, batch)
        session.pull()  # Variables that were just built have this process's initial values.
    if keras.backend.backend() == "tensorflow":
        model.jit_compile = False  # XLA cannot call Python.
    model.steps_per_execution = 1
    model.make_train_function()
    match keras.backend.backend():
        case "tensorflow":
            logs = model.train_function(iter([batch]))
        case "torch":
            model.train()
            logs = model.train_function([batch])
        case _:
            if overrides(model, "train_step"):  # it may change any of them, without ``assign``
                for weight in model.weights:
                    session.note(weight, compiled=True)
            state = jax_state(model)
            logs, new = model.train_function(state, iter([batch]))
            with doing("receiving_values"):
                _assign(model, new)
    return dict(pythonify_logs(logs))


def _build(model: Any, batch: Any) -> None:
    with doing("tracing_step"):
        build_from_batch(model, batch)


def _assign(model: Any, state: Any) -> None:
    optimizer_variables = model.optimizer.variables
    groups = (model.trainable_variables, model.non_trainable_variables, optimizer_variables, model.metrics_variables)
    for variables, values in zip(groups, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
