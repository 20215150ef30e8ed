"""The training step of ``fit``: the chief schedules each batch, and a worker trains on it.

Keras' own ``fit`` runs on the chief, with its training function replaced: each call takes the next batches, in the form
that the framework's ``fit`` passes them, and schedules ``train_on`` for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from choros.distribute.parameter_server.session import ServerSession
from choros.training.keras_internals import build_from_batch, jax_state, pythonify_logs

__all__ = ["coordinated_train_function", "train_on"]

#: Schedules a batch; returns the latest logs.
ScheduleBatch = Callable[[Any], dict[str, Any]]


def train_on(session: ServerSession, model: Any, batch: Any) -> dict[str, float]:
    """On a worker: runs Keras' own training step; returns its logs."""
    build_from_batch(model, batch)
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
            state = jax_state(model)
            logs, new = model.train_function(state, iter([batch]))
            _assign(model, new)
    return dict(pythonify_logs(logs))


def coordinated_train_function(model: Any, schedule: ScheduleBatch) -> Callable[..., Any]:
    """On the chief: returns the function that replaces the model's training function."""
    steps = model.steps_per_execution

    def from_iterator(iterator: Any) -> dict[str, Any]:
        logs = schedule(next(iterator))
        for batch in itertools.islice(iterator, steps - 1):
            logs = schedule(batch)
        return logs

    def from_list(batches: Sequence[Any]) -> dict[str, Any]:
        return from_iterator(iter(batches))

    def with_state(state: Any, iterator: Any) -> tuple[dict[str, Any], Any]:
        # Keras moves the values out of the model's variables during training; the chief needs them there.
        _assign(model, state)
        logs = from_iterator(iterator)
        return logs, jax_state(model)

    return {"tensorflow": from_iterator, "torch": from_list}.get(keras.backend.backend(), with_state)


def _assign(model: Any, state: Any) -> None:
    optimizer_variables = model.optimizer.variables
    groups = (model.trainable_variables, model.non_trainable_variables, optimizer_variables, model.metrics_variables)
    for variables, values in zip(groups, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
