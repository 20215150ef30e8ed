"""How far ``fit`` is, for ``choros top`` and reports: rank 0 emits it once a second, with its logs.

Keras' history does it, as it is the last callback: it sees the logs as all others have left them.
"""

import time
from collections.abc import Mapping
from numbers import Real
from typing import Any

from choros import durations
from choros.observe import events
from choros.observe.events import Kind
from choros.training.first_rank import is_first


def report_metrics(model: Any, params: Mapping[str, Any]) -> None:
    """Makes the history of this ``fit`` emit ``Kind.METRICS``, if anybody listens: until the end of ``fit``."""
    history = getattr(model, "history", None)  # a CallbackList of the user's may have none
    if history is None or Kind.METRICS not in events.heard or "on_train_batch_end" in vars(history):
        return
    position = {"epochs": params.get("epochs"), "batches": params.get("steps")}
    known: dict[str, float] = {}  # of the last epoch, such as those of validation
    due, end_epoch = 0.0, history.on_epoch_end

    def emit() -> None:
        if is_first():
            whole = {name: int(value) for name, value in position.items() if value is not None}
            events.emit(Kind.METRICS, model.name, **whole, logs=dict(known))

    def on_train_batch_end(batch: int, logs: Any = None) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + durations.METRICS
            position["batch"] = batch + 1
            known.update(_numbers(logs))
            emit()

    def on_epoch_begin(epoch: int, *_: Any) -> None:
        position.update(epoch=epoch + 1, batch=0)

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        end_epoch(epoch, logs)
        position["batch"] = position["batches"]
        known.update(_numbers(logs))

    def on_train_end(*_: Any) -> None:
        for hook in hooks:
            delattr(history, hook)
        emit()

    hooks = {each.__name__: each for each in (on_epoch_begin, on_train_batch_end, on_epoch_end, on_train_end)}
    vars(history).update(hooks)


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
