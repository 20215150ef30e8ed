"""Keras' ``fit``, ``evaluate`` and ``predict`` with one replica a process: each gets its rows of every global batch.

::

    the user's call                     what Keras' own method is called with, on every process
    fit(x, y, batch_size=64)            this process's rows of each batch of 64; the same order everywhere
        callbacks=[…]                   first ours: equal weights, global metrics; those that write on process 0 alone
        verbose=1                       on process 0
    evaluate(…)                         its rows; then the metrics' sums are added up, and all get the same numbers
    predict(…)                          its rows; then all outputs, in the order of the input
    save(…)                             process 0 writes, the others wait until it has
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import global_process_set
from choros.distribute import datasets
from choros.distribute.fit.call import Call
from choros.distribute.fit.gradients import distribute_optimizer
from choros.distribute.fit.prediction import predict_rows
from choros.distribute.fit.tf_checkpoints import lead_checkpoint, lead_manager
from choros.distribute.fit.training import Training
from choros.distribute.replicas import Replicas
from choros.distribute.scope import enter_fit, in_fit, in_replica
from choros.distribute.writing import write_once
from choros.errors import ConfigError
from choros.parallel.data import Part, Sharding, are_arrays, check_global_batch, count_rows, cut, kind_of
from choros.parallel.objects import broadcast_object
from choros.parallel.structure import map_structure
from choros.topology import shard_range
from choros.training.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from choros.training.keras_internals import (
    build_before_training,
    flatten_metrics,
    has_value,
    initial_epoch,
    set_initial_epoch,
    train_validation_split,
)
from choros.training.metrics import global_result, global_results
from choros.training.trainer import attach
from choros.training.variables import broadcast_variables

__all__ = ["SynchronousTraining"]

_BATCH = 32
#: Callbacks of Keras that write where others must not write at the same time.
_WRITERS = ("TensorBoard", "CSVLogger", "RemoteMonitor")


@final
class SynchronousTraining(Training):
    """All processes train one model together.

    Args:
        replicas: one for each process.
        state_owner: the process that alone keeps the state of optimizers and makes updates; ``None``: every one does.
    """

    def __init__(self, replicas: Replicas, state_owner: int | None = None) -> None:
        self._replicas = replicas
        self._state_owner = state_owner

    def variable_made(self, variable: Any) -> None:
        """Gives weights the first process's initial values: replicas begin alike, but for the seeds of random layers.

        What is made in ``fit`` is made equal there, when all of it is there.
        """
        if self._replicas.count > 1 and not in_fit() and variable.trainable and has_value(variable):
            with _outside_of_graphs():
                broadcast_variables([variable], 0)

    def optimizer_made(self, optimizer: Any) -> None:
        """It will reduce the replicas' gradients."""
        distribute_optimizer(optimizer, self._state_owner)

    def model_made(self, model: Any) -> None:
        """Nothing: it is caught when it is compiled."""

    def metric_made(self, metric: Any) -> None:
        """Has ``metric.result()`` tell of all replicas' examples, outside of ``run`` and ``fit``."""
        own = metric.result

        @functools.wraps(own)
        def result() -> Any:
            return own() if in_fit() or in_replica() else global_result(metric, own)

        object.__setattr__(metric, "result", result)

    def checkpoint_made(self, checkpoint: Any) -> None:
        """Process 0 will write it."""
        lead_checkpoint(checkpoint)

    def checkpoint_manager_made(self, manager: Any) -> None:
        """Process 0 will write what it manages."""
        lead_manager(manager)

    def compile(self, model: Any, call: Call) -> None:
        """An optimizer that was made elsewhere is taken over here."""
        call.run()
        distribute_optimizer(model.optimizer, self._state_owner)
        if keras.backend.backend() == "tensorflow":
            build_before_training(model)

    def fit(self, model: Any, call: Call) -> Any:
        """Trains on this process's rows of each global batch."""
        if self._replicas.count == 1:
            return _alone(call)
        x, y, weights, validation = _split_validation(call)
        batch_size = call["batch_size"]
        data = self._training_data(x, y, weights, batch_size, shuffle=call["shuffle"], epoch=call["initial_epoch"])
        changes = {"x": data, "y": None, "sample_weight": None, "batch_size": None, "validation_split": 0.0}
        if validation is not None:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(validation)
            held_out = self._part(x, y, weights, call["validation_batch_size"] or batch_size)
            changes["validation_data"] = validation if held_out is None else held_out
            changes["validation_batch_size"] = None
        changes["callbacks"] = self._callbacks(call["callbacks"])
        with enter_fit():
            history = call.replaced(**changes, shuffle=False, verbose=self._verbosity(call)).run()
        global_process_set.communicator.barrier()  # what process 0 has written is there for all
        return history

    def evaluate(self, model: Any, call: Call) -> Any:
        """Evaluates this process's rows, then adds up what the metrics have seen."""
        if self._replicas.count == 1:
            return _alone(call)
        data = self._part(call["x"], call["y"], call["sample_weight"], call["batch_size"], steps=call["steps"])
        callbacks = self._writing(call["callbacks"])
        call = call.replaced(callbacks=callbacks, verbose=self._verbosity(call))
        if data is None:  # fewer examples than replicas: everybody evaluates all of them
            return _alone(call)
        steps = None if are_arrays(call["x"]) else call["steps"]
        changes = {"x": data, "y": None, "sample_weight": None, "batch_size": None, "steps": steps}
        with enter_fit():
            call.replaced(**changes, return_dict=True).run()
            results = global_results(model)
        return results if call["return_dict"] else flatten_metrics(model, results)

    def predict(self, model: Any, call: Call) -> Any:
        """Predicts this process's rows, then gathers everybody's."""
        call = call.replaced(callbacks=self._writing(call["callbacks"]), verbose=self._verbosity(call))
        if call["steps"] is not None and are_arrays(call["x"]):
            call = call.replaced(x=cut(call["x"], 0, call["steps"] * (call["batch_size"] or _BATCH)), steps=None)
        with enter_fit():
            return predict_rows(call, self._replicas.first, self._replicas.count)

    def train_on_batch(self, model: Any, call: Call) -> Any:
        """One step on this process's rows."""
        attach(model)
        return self._on_batch(model, call, ("x", "y", "sample_weight"))

    def test_on_batch(self, model: Any, call: Call) -> Any:
        """Adds this process's rows to the metrics."""
        return self._on_batch(model, call, ("x", "y", "sample_weight"))

    def predict_on_batch(self, model: Any, call: Call) -> Any:
        """Predicts this process's rows, then gathers everybody's."""
        with enter_fit():
            return predict_rows(call, self._replicas.first, self._replicas.count)

    def save(self, model: Any, call: Call) -> None:
        """Process 0 writes."""
        write_once(call.run)

    save_weights = save
    export = save

    def _on_batch(self, model: Any, call: Call, names: tuple[str, ...]) -> Any:
        if self._replicas.count == 1:
            return _alone(call)
        rows = count_rows(call["x"])
        check_global_batch(rows, self._replicas.count)
        start, end = shard_range(rows, self._replicas.first, self._replicas.count)
        with enter_fit():
            call.replaced(**{name: cut(call[name], start, end) for name in names}, return_dict=True).run()
            results = global_results(model)
        return results if call["return_dict"] else flatten_metrics(model, results)

    # data ---------------------------------------------------------------------------------------

    def _training_data(self, x: Any, y: Any, weights: Any, batch_size: int | None, *, shuffle: Any, epoch: int) -> Any:
        if not are_arrays(x):
            return self._batches(x)
        check_global_batch(min(batch_size or _BATCH, count_rows(x)), self._replicas.count)
        seed = broadcast_object(int(np.random.randint(2**31)))
        sharding = Sharding(self._part_of_batches(), batch_size or _BATCH, bool(shuffle), seed, epoch)
        return _sharded(_packed(x, y, weights), sharding)

    def _part(self, x: Any, y: Any, weights: Any, batch_size: int | None, steps: int | None = None) -> Any:
        """This process's part of data that is evaluated; ``None`` if there is not a row for each."""
        if not are_arrays(x):
            return self._batches(x)
        data = _packed(x, y, weights)
        size = batch_size or _BATCH
        rows = count_rows(x) if steps is None else min(count_rows(x), steps * size)
        if rows < self._replicas.count:
            return None
        return _sharded(cut(data, 0, rows), Sharding(self._part_of_batches(), max(size, self._replicas.count)))

    def _part_of_batches(self) -> Part:
        return Part(self._replicas.first, self._replicas.count)

    def _batches(self, data: Any) -> Any:
        return datasets.split_batches(data, self._replicas)

    # callbacks and output -----------------------------------------------------------------------

    def _callbacks(self, given: Any) -> list[Any]:
        """Ours come first: then the others see equal weights and global metrics."""
        others = self._writing(given)
        backups = [each for each in others if isinstance(each, keras.callbacks.BackupAndRestore)]
        others = [each for each in others if each not in backups]
        mine = backups if self._replicas.first == 0 else []
        same = (_SameEpoch(), BroadcastGlobalVariablesCallback(0), _SameStatistics())
        return [MetricAverageCallback(), *mine, *same, *others]

    def _writing(self, given: Any) -> list[Any]:
        """The user's callbacks; on other processes than the first without those that only write, and silent."""
        if isinstance(given, keras.callbacks.CallbackList):
            raise ConfigError(
                "pass callbacks as a list: a strategy adds its own to them, which a CallbackList does not allow."
            )
        callbacks = list(keras.tree.flatten(given)) if given else []
        if self._replicas.first == 0:
            return callbacks
        quiet = [each for each in callbacks if type(each).__name__ not in _WRITERS]
        for each in quiet:
            if type(each).__module__.partition(".")[0] == "keras" and hasattr(each, "verbose"):
                each.verbose = 0
        return quiet

    def _verbosity(self, call: Call) -> Any:
        return call["verbose"] if self._replicas.first == 0 else 0


@final
class _SameEpoch(keras.callbacks.Callback):
    """All begin at the epoch to which a backup, which process 0 alone has read, takes the training back."""

    def on_train_begin(self, logs: Any = None) -> None:
        set_initial_epoch(self.model, broadcast_object(initial_epoch(self.model)))


@final
class _SameStatistics(keras.callbacks.Callback):
    """Averages over the processes what layers count of their own inputs, such as batch normalisation.

    ``tf.distribute`` does so when such a variable is read. Here that is when it is next made use of: at the end of an
    epoch, and before validation.
    """

    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def _average(self) -> None:
        counted = [each for each in self.model.non_trainable_variables if "float" in each.dtype]
        own = [adapter_of(each.value).to_host(each.value) for each in counted]
        communicator = global_process_set.communicator
        for variable, value in zip(counted, communicator.grouped_allreduce(own, name="statistics"), strict=True):
            variable.assign(value)


def _alone(call: Call) -> Any:
    """The call as it is: there is nobody to share its data with."""
    with enter_fit():
        return call.run()


def _outside_of_graphs() -> AbstractContextManager[Any]:
    """A variable that is made while TensorFlow traces a function has its value outside of it."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    return tf.init_scope()  # type: ignore[no-any-return]


def _packed(x: Any, y: Any, weights: Any) -> Any:
    """The arrays as rows of one structure, in host memory."""
    given = (x,) if y is None and weights is None else (x, y) if weights is None else (x, y, weights)
    return map_structure(lambda leaf: adapter_of(leaf).to_host(leaf), given)


def _sharded(data: Any, sharding: Sharding) -> Any:
    return kind_of(data).shard(data, sharding)


def _split_validation(call: Call) -> tuple[Any, Any, Any, Any]:
    """``x``, ``y``, ``sample_weight`` and validation data, as ``validation_split`` wants it."""
    x, y, weights, validation = call["x"], call["y"], call["sample_weight"], call["validation_data"]
    if validation is not None or not call["validation_split"]:
        return x, y, weights, validation
    (x, y, weights), validation = train_validation_split((x, y, weights), validation_split=call["validation_split"])
    return x, y, weights, validation
