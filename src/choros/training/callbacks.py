"""Callbacks of both programming models: identical weights, metrics of all ranks, epochs that end together; and what
calls others on rank 0 alone.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, final

import keras

from choros import durations
from choros.comm import Request, global_process_set, is_initialized, topology
from choros.errors import ConfigError
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.progress import page
from choros.parallel.identical import are_identical
from choros.parallel.objects import object_of_first
from choros.parallel.reduce import noise
from choros.settings import current
from choros.training.keras_internals.fit import initial_epoch, set_initial_epoch, sync_jax_state
from choros.training.keras_internals.models import is_built, overrides
from choros.training.loading import time_loading
from choros.training.metrics import (
    as_logged,
    count_examples,
    flat_results,
    global_results,
    logs_of_step,
    own_results,
    shared_logs,
)
from choros.training.random_numbers import draw_by_rank
from choros.training.trainer import Steps, attach, model_variables
from choros.training.variables import broadcast_variables

_FIRST_EPOCH = Request("first epoch")
_log = logging.getLogger("choros")
_NOT_MEASURED = "CHOROS_NOISE_SCALE has measured no step of this fit: docs/training.md says which steps are."


def is_first() -> bool:
    """Whether this is rank 0 at present; not a new rank before the others have taken it in."""
    communicator = global_process_set.communicator
    return communicator.rank == 0 and not communicator.is_new


class EpochCallback(keras.callbacks.Callback):
    """The base of all choros callbacks: prepares the model, and ends each epoch on all ranks at once. Ranks without
    batches join until all are done, before anything that compares ranks or reads the weights: before validation, or
    else at the end of the epoch. The first choros callback in the list does it.
    """

    _steps: Steps

    def set_params(self, params: Any) -> None:
        """Leaves Keras' progress bar to rank 0, unless the program has set ``verbose``.

        Keras gives all callbacks the same dictionary; its progress bar is the last one to read it.
        """
        if params and params.get("verbose") == "auto" and is_initialized() and topology().rank > 0:
            params["verbose"] = 0
        super().set_params(params)

    def set_model(self, model: Any) -> None:
        """Prepares the model; Keras calls it before it builds the training function."""
        super().set_model(model)
        draw_by_rank(model)
        self._steps = attach(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins anew, also after a ``fit`` that an exception has ended."""
        self._steps.in_epoch = False
        self._steps.evaluation.forget()
        noise.publish(None)
        _report_metrics(self.model, self.params)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Marks that batches may come, so that the rank joins at their end."""
        if self._steps.optimizers and not self._steps.in_epoch:
            events.emit(Kind.EPOCH_BEGUN, self.model.name, epoch=epoch)
            self._steps.begin_epoch(epoch)
        time_loading(self.model)

    def on_test_begin(self, logs: Any = None) -> None:
        """Ends the epoch's batches, in ``fit``."""
        self._end_batches()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the epoch's batches."""
        self._end_batches()

    def _end_batches(self) -> None:
        if self._steps.in_epoch:
            self._steps.end_epoch()
            events.emit(Kind.EPOCH_DONE, self.model.name)
        page.begin_pause()


@final
class BroadcastGlobalVariablesCallback(EpochCallback):
    """Starts all ranks from the weights and the optimizer state of one rank, and the epoch of the first, before the
    first step. What restores them on one rank, such as Keras' ``BackupAndRestore``, comes before this callback. Warns
    after the first epoch if ranks train apart, as no optimizer of the model is distributed.

    Horovod broadcasts after the first batch, whose loss is then computed from different weights. So does this callback
    for a model on TensorFlow that infers its input shape from the first batch, as it has no weights before.

    Args:
        root_rank: the rank whose variables all ranks receive; a global rank.
        device: Horovod's; has no effect.
        local_variables: variables that are not broadcast, or one variable.

    Raises:
        ConfigError: on all ranks, if they do not begin with the same epoch.

    Example:
        >>> BroadcastGlobalVariablesCallback(0).root_rank
        0
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        local = [local_variables] if hasattr(local_variables, "assign") else local_variables or ()
        self._left_out = {id(variable) for variable in local}
        self._begins = self._compares = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts if the model is built, else schedules the broadcast; a rank that came later has the weights."""
        super().on_train_begin(logs)
        self._begins = self._steps.epochs is None or not self._steps.epochs.is_late
        self._compares = not (self._steps.optimizers or global_process_set.communicator.elastic)
        if self._begins or global_process_set.communicator.is_new:
            set_initial_epoch(self.model, object_of_first(lambda: initial_epoch(self.model)))
        if not self._begins:
            return
        if is_built(self.model):
            self._broadcast()
        else:
            # Not a method of the class: on JAX, where models are built before, it would keep Keras from calling
            # callbacks in other threads.
            self.on_train_batch_end = self._after_first_batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Checks, before the first epoch, that it is the same on all ranks."""
        super().on_epoch_begin(epoch, logs)
        if not self._begins:
            return
        self._begins = False
        epochs = global_process_set.communicator.agree(_FIRST_EPOCH, value=epoch)
        if len({*epochs}) > 1:
            raise ConfigError(
                f"ranks begin with different epochs, {epochs}: what restores weights and epoch on one rank, such as "
                "BackupAndRestore, must come before BroadcastGlobalVariablesCallback in the list of callbacks."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the epoch's batches, and compares what ranks have trained in the first."""
        super().on_epoch_end(epoch, logs)
        compares, self._compares = self._compares, False
        if not compares:
            return
        sync_jax_state(self.model)
        trained = [each.value for each in self.model.trainable_variables if id(each) not in self._left_out]
        if not are_identical(trained) and is_first():
            _log.warning(
                "each rank trains the model %r alone: none of its optimizers is distributed, and ranks have different "
                "weights after their first epoch. Compile it with DistributedOptimizer(optimizer).",
                self.model.name,
            )

    def _after_first_batch(self, batch: int, logs: Any = None) -> None:
        del self.on_train_batch_end
        self._broadcast()

    def _broadcast(self) -> None:
        variables = model_variables(self.model, seeds=self._steps.is_spmd)
        variables = [variable for variable in variables if id(variable) not in self._left_out]
        broadcast_variables(variables, self.root_rank)


@final
class MetricAverageCallback(EpochCallback):
    """Replaces the metrics in the logs by those over all ranks' examples, for training and validation.

    Callbacks that come after it (``EarlyStopping``, ``ReduceLROnPlateau``, the history and the progress bar's
    last line) see the same numbers and make the same decisions on every rank. Put it before them.

    So does ``model.evaluate(…, callbacks=[MetricAverageCallback()])``, on all ranks together, and returns the same.

    Args:
        device: Horovod's; has no effect.
        whole_tests: whether every rank evaluates all examples, and not its part of them.
    """

    def __init__(self, device: str = "", *, whole_tests: bool = False) -> None:
        super().__init__()
        del device
        self._whole_tests = whole_tests
        self._training: dict[str, float] = {}
        self._own: dict[str, Any] = {}
        self._validation: dict[str, float] = {}
        self._in_epoch = False
        self._examples = 0
        self.shared: dict[str, float] = {}  # the logs, of all ranks, of the last test by a step of the user's

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Discards the metrics of the last epoch."""
        super().on_epoch_begin(epoch, logs)
        self._training, self._validation = {}, {}
        self._in_epoch = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Stores the training metrics: validation uses the same variables."""
        super().on_test_begin(logs)
        if self._in_epoch:
            self._store_training()
        if not self._whole_tests:
            self._steps.evaluation.begin()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Ends this rank or begins again, in an elastic job, if it is time."""
        self._steps.evaluation.begin_batch()

    def on_test_end(self, logs: Any = None) -> None:
        """Replaces the metrics of ``evaluate``, or stores them for the end of the epoch."""
        if self._whole_tests:
            results = global_results(self.model, counted=True)
        else:
            results = flat_results(self._steps.evaluation.end())
        logged = as_logged(results, logs or ())
        if logs is not None and overrides(self.model, "test_step"):
            logged = self.shared = logs_of_step(self.model, logs, count_examples(self.model) or 1, results)
            logs.update(logged)
        if self._in_epoch or self._training:
            self._validation = {f"val_{name}": value for name, value in logged.items()}
        _replace(logs, logged)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the logs that all later callbacks see."""
        super().on_epoch_end(epoch, logs)
        if self._in_epoch:
            self._store_training()
        if logs is None:
            return
        of_training = {name for name in logs if not name.startswith("val_")}
        known = {**as_logged(self._training, of_training), **self._validation}
        others = {name: value for name, value in logs.items() if name not in known}
        _replace(logs, known)
        # Of a rank without batches, Keras logs no metrics.
        if len(of_training) == len(logs):
            logs.update(self._validation)
        if not of_training:
            logs.update(self._training)
        if others or overrides(self.model, "train_step"):
            share = self._steps.last_share
            weight = (self._examples or 1) if share is None else share
            logs.update(shared_logs(others, weight, self._own, self._training))
        if (measured := noise.noise_scale()) is not None:
            logs["noise_scale"] = measured.noise_scale

    def on_train_end(self, logs: Any = None) -> None:
        """Says what the batch costs, with ``CHOROS_NOISE_SCALE``."""
        if current().noise_scale and is_initialized() and topology().rank == 0:
            _log.warning("%s", noise.noise_scale() or _NOT_MEASURED)

    def _store_training(self) -> None:
        self._in_epoch = False
        self._examples = count_examples(self.model)
        self._own = own_results(self.model) if overrides(self.model, "train_step") else {}
        self._training = global_results(self.model, counted=self._steps.is_spmd)


def _replace(logs: dict[str, Any] | None, results: dict[str, float]) -> None:
    if logs is not None:
        logs.update({name: value for name, value in results.items() if name in logs})


def _report_metrics(model: Any, params: Mapping[str, Any]) -> None:
    """Says how far ``fit`` is, for ``choros top`` and reports: rank 0 emits it once a second, with its logs, until the
    end of ``fit``, if anybody listens. Keras' history does it, the last callback: it sees the logs as all leave them.
    """
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


def _passed_on(hook: str) -> Callable[..., None]:
    def call(self: "FirstRankCallback", *arguments: Any, **named: Any) -> None:
        self.pass_on(hook, *arguments, **named)

    return call


@final
class FirstRankCallback(keras.callbacks.Callback):
    """Calls ``callback``, which writes files or prints, on rank 0; if that is lost, the next rank 0 begins it
    (``CSVLogger`` adds), but not a ``BackupAndRestore``::

                  rank 0                 rank 1, then 0                              rank 2, then 1
        epoch 1   writes a row           -                                           -
        epoch 2   kill -9                begins, in epoch 2; writes a row            -
        epoch 3                          writes a row                                -

    >>> FirstRankCallback(keras.callbacks.CSVLogger("log.csv")).callback.filename
    'log.csv'
    """

    def __init__(self, callback: Any, verbose: Any = None) -> None:
        super().__init__()
        self.callback = callback
        self.async_safe = getattr(callback, "async_safe", False)
        self._verbose = verbose
        self._begun = False
        self._epoch: int | None = None

    def set_params(self, params: Any) -> None:
        """Passes them on."""
        super().set_params(params)
        self.callback.set_params(params if self._verbose is None else {**params, "verbose": self._verbose})

    def pass_on(self, hook: str, *arguments: Any, **named: Any) -> None:
        """Calls a method of the callback, if this is rank 0; before the first one those that it has missed."""
        is_epoch = hook == "on_epoch_begin"
        if is_epoch:
            self._epoch = arguments[0]
        if not is_first():
            return
        if not self._begun:
            self.callback.set_model(self.model)  # in which Keras' TensorBoard makes files
        if not self._begun and hook != "on_train_begin":
            go_on(self.callback)
            self.callback.on_train_begin()
            if self._epoch is not None and not is_epoch:
                self.callback.on_epoch_begin(self._epoch)
        self._begun = True
        getattr(self.callback, hook)(*arguments, **named)

    on_epoch_begin = _passed_on("on_epoch_begin")
    on_epoch_end = _passed_on("on_epoch_end")
    on_train_begin, on_train_end = _passed_on("on_train_begin"), _passed_on("on_train_end")
    on_test_begin, on_test_end = _passed_on("on_test_begin"), _passed_on("on_test_end")
    on_train_batch_begin, on_train_batch_end = _passed_on("on_train_batch_begin"), _passed_on("on_train_batch_end")
    on_test_batch_begin, on_test_batch_end = _passed_on("on_test_batch_begin"), _passed_on("on_test_batch_end")


def verbose_on_first_rank(callbacks: Sequence[Any]) -> Any:
    """Lets Keras' own ``verbose`` callbacks print on rank 0 alone, from the start of each epoch; put it before them."""
    own = [each for each in callbacks if type(each).__module__.partition(".")[0] == "keras"]
    levels = [(each, each.verbose) for each in own if hasattr(each, "verbose")]

    def set_levels(*_: Any, **__: Any) -> None:
        for each, level in levels:
            each.verbose = level if is_first() else 0

    return keras.callbacks.LambdaCallback(on_train_begin=set_levels, on_epoch_begin=set_levels)


def go_on(callback: Any) -> None:
    """Prepares a callback for training that has begun before: a log is added to, and a backup, now older, not read."""
    if isinstance(getattr(callback, "append", None), bool):
        callback.append = True
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        callback.on_train_begin = lambda _=None: None
