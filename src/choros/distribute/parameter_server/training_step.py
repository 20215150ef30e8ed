"""One batch of ``fit``: how the chief sends it, and what a worker does with it.

Keras' own ``fit`` runs on the chief, with its training function replaced: each call takes the next batch, as that
framework's ``fit`` passes it, and schedules ``train_on``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from choros.distribute.parameter_server.session import Session
from choros.training.keras_internals import build_from_batch, jax_state, pythonify_logs

__all__ = ["leading_function", "train_on"]

#: Schedules a batch; returns the logs of those that are done.
Lead = Callable[[Any], dict[str, Any]]


def train_on(session: Session, model: Any, batch: Any) -> dict[str, float]:
    """On a worker: Keras' own training step; returns its logs."""
    build_from_batch(model, batch)
    session.pull()  # What was built just now has this process's initial values.
    if keras.backend.backend() == "tensorflow":
        model.jit_compile = False  # XLA cannot call the host.
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


def leading_function(model: Any, lead: Lead) -> Callable[..., Any]:
    """On the chief: what ``fit`` calls in the place of the model's training function."""
    steps = model.steps_per_execution

    def from_iterator(iterator: Any) -> dict[str, Any]:
        logs = lead(next(iterator))
        for batch in itertools.islice(iterator, steps - 1):
            logs = lead(batch)
        return logs

    def from_list(batches: Sequence[Any]) -> dict[str, Any]:
        return from_iterator(iter(batches))

    def with_state(state: Any, iterator: Any) -> tuple[dict[str, Any], Any]:
        # Keras takes the values out of the model's variables while it trains: here they are needed.
        _assign(model, state)
        logs = from_iterator(iterator)
        return logs, jax_state(model)

    return {"tensorflow": from_iterator, "torch": from_list}.get(keras.backend.backend(), with_state)


def _assign(model: Any, state: Any) -> None:
    of_optimizer = model.optimizer.variables
    variables = (model.trainable_variables, model.non_trainable_variables, of_optimizer, model.metrics_variables)
    for each, values in zip(variables, state, strict=True):
        for variable, value in zip(each, values, strict=True):
            variable.assign(value)
