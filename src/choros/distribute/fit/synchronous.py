"""Keras' ``fit``, ``evaluate`` and ``predict`` with one replica per process: each gets its rows of every global batch.

::

    the user's call                     the call of Keras' own method, on every process
    fit(x, y, batch_size=64)            this process's rows of each batch of 64; the same order on all
        callbacks=[…]                   equal weights, global metrics; then the given ones, writers on process 0 only
        verbose=1                       on process 0
    evaluate(…)                         its rows; then the metrics' sums are reduced: all processes return the same
    predict(…)                          its rows; then all outputs are gathered, in the order of the input
    save(…)                             process 0 writes, the others wait
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, final

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import global_process_set
from choros.config import COMMIT_DIR
from choros.distribute import datasets
from choros.distribute.fit.call import KerasCall
from choros.distribute.fit.gradients import distribute_optimizer
from choros.distribute.fit.prediction import predict_rows
from choros.distribute.fit.random_numbers import follow_seeds
from choros.distribute.fit.shares import shares_named
from choros.distribute.fit.statistics import Statistics, average_variables
from choros.distribute.fit.training import Training
from choros.distribute.fit.variables import (
    aggregates,
    assign_initial,
    follow_aggregation,
    release,
    settle_aggregated,
    share_equally,
)
from choros.distribute.replicas import Replicas
from choros.distribute.scope import enter_fit, in_fit, in_replica
from choros.distribute.tf_variables import settle_variables
from choros.distribute.writing import is_writing, write_once
from choros.elastic.job import elastic_job
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.data import (
    EpochData,
    Part,
    Sharding,
    StepsOfEpoch,
    are_arrays,
    check_global_batch,
    count_rows,
    cut,
    data_of,
    epochs_behind,
    epochs_of,
    epochs_of_shard,
    epochs_of_steps,
    kind_of,
)
from choros.parallel.identical import are_identical
from choros.parallel.moments import RankMoments
from choros.parallel.objects import object_of_first
from choros.parallel.structure import map_structure
from choros.training.admission import AdmissionCallback
from choros.training.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback, StepCallback
from choros.training.commits import CommitCallback
from choros.training.elastic_evaluation import repeated
from choros.training.first_rank import FirstRankCallback, VerbosityCallback
from choros.training.keras_internals import (
    built_before_training,
    flatten_metrics,
    hand_over_arrays,
    has_states_of_rows,
    has_value,
    initial_epoch,
    layers_of,
    local_value,
    own_variables,
    set_initial_epoch,
    statistics_of,
    train_validation_split,
)
from choros.training.metric_states import watch
from choros.training.metrics import flat_results, global_result, global_results
from choros.training.random_numbers import draw_by_rank
from choros.training.trainer import attach

__all__ = ["SynchronousTraining"]

_log = logging.getLogger("choros")
_BATCH = 32
#: Callbacks of Keras that write files or send messages, which only one process must do.
_WRITERS = ("TensorBoard", "CSVLogger", "RemoteMonitor")


@final
class SynchronousTraining(Training):
    """Synchronous training of one model by all processes.

    Args:
        replicas: one for each process.
        state_owner: the only process that keeps the optimizers' state and applies updates; ``None``: all processes do.
    """

    follows_run = True

    def __init__(self, replicas: Replicas, state_owner: int | None = None) -> None:
        self._replicas = replicas
        self._state_owner = state_owner
        self._statistics = Statistics(replicas)
        hand_over_arrays()

    def variable_created(self, variable: Any) -> None:
        """Broadcasts the initial value from process 0, unless all processes have the same.

        Variables created in ``fit`` are broadcast there, once all of them exist. Metrics start from zero. Where one
        process keeps the optimizer's state, only that one creates it.
        """
        if self._replicas.count == 1:
            return
        follow_aggregation(variable)
        by_metric = variable.synchronization == "on_read" and not aggregates(variable)
        if in_fit() or by_metric or not has_value(variable):
            return
        value = local_value(variable)
        adapter = adapter_of(value)
        if adapter.is_symbolic([value]) or not (variable.trainable or self._state_owner is None):
            return
        with _outside_of_graphs():
            host = adapter.to_host(value)
            received = host if are_identical([host]) else ops.broadcast(host, 0, name="initial value")
            if received is not host or aggregates(variable):
                assign_initial(variable, adapter.from_host(np.array(received), value))

    def weight_added(self, weight: Any) -> None:
        """Makes a layer's statistics those of all replicas, outside of ``run`` and ``fit``."""
        if self._replicas.count > 1 and not weight.trainable and "float" in weight.dtype and not aggregates(weight):
            self._statistics.add(weight)

    def optimizer_created(self, optimizer: Any) -> None:
        """Patches the optimizer to reduce the replicas' gradients."""
        distribute_optimizer(optimizer, self._replicas, self._state_owner)
        for variable in own_variables(optimizer):
            release(variable)

    def model_created(self, model: Any) -> None:
        """Does nothing: the model is prepared when it is compiled."""

    def metric_created(self, metric: Any) -> None:
        """Makes ``metric.result()`` cover the examples of all replicas, outside of ``run`` and ``fit``."""
        watch(metric)
        own = metric.result

        @functools.wraps(own)
        def result() -> Any:
            return own() if in_fit() or in_replica() else global_result(metric, own)

        object.__setattr__(metric, "result", result)

    def seed_generator_created(self, generator: Any) -> None:
        """Makes it draw other numbers on each replica."""
        follow_seeds([generator], self._replicas)

    def seed_generators_used(self) -> None:
        """Makes Keras' own generator draw other numbers on each replica."""
        follow_seeds(None, self._replicas)

    def combine_moments(self) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
        """Returns what combines the moments of all processes, whose gradients ``run`` adds."""
        return RankMoments().combine if self._replicas.count > 1 and in_replica() else None

    def compile(self, model: Any, call: KerasCall) -> None:
        """Compiles the model, and patches its optimizer if it was created outside of the scope."""
        call.run()
        if model.optimizer is not None:  # a step of its own may have others
            distribute_optimizer(model.optimizer, self._replicas, self._state_owner)

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Trains on this process's rows of each global batch."""
        self._statistics.average(model)
        if self._replicas.count == 1 and not elastic_job().survives:  # a last rank goes on as the others began
            return _run_locally(call)
        share_equally(model)
        steps = attach(model)
        x, y, weights, validation = _split_validation(call)
        batch_size = call["batch_size"]
        data = self._training_data(call, x, y, weights)
        if not (are_arrays(x) and (validation is None or are_arrays(validation))):
            steps.expect_absent_rows()
        own = data.data if isinstance(data, EpochData) else data
        changes = {"x": own, "y": None, "sample_weight": None, "batch_size": None, "validation_split": 0.0}
        held_out = None
        if validation is not None:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(validation)
            held_out = self._part(x, y, weights, call["validation_batch_size"] or batch_size)
            changes["validation_data"] = validation if held_out is None else held_out
            changes["validation_batch_size"] = None
        verbose = self._verbosity(call)
        callbacks = self._callbacks(call["callbacks"], MetricAverageCallback(whole_tests=held_out is None))
        if global_process_set.communicator.elastic:
            if call["verbose"]:  # Keras' own progress bar would end with rank 0
                callbacks.append(FirstRankCallback(keras.callbacks.ProgbarLogger(), call["verbose"]))
            callbacks, verbose = [StepCallback(), *callbacks, AdmissionCallback(callbacks)], 0
        changes["callbacks"] = callbacks
        elastic = steps.elastic(data, call["class_weight"]) if isinstance(data, EpochData) else nullcontext()
        named = shares_named(batch_size, self._replicas.count)
        with named, enter_fit(), built_before_training(model), elastic:
            history = call.replaced(**changes, shuffle=False, verbose=verbose).run()
        global_process_set.communicator.barrier()  # the files that process 0 has written exist for all processes
        return history

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Evaluates this process's rows, then reduces the metrics' sums."""
        self._statistics.average(model)
        if self._replicas.count == 1:
            return _run_locally(call)
        data = self._part(call["x"], call["y"], call["sample_weight"], call["batch_size"], steps=call["steps"])
        callbacks = self._callbacks_of_rank(call["callbacks"])
        call = call.replaced(callbacks=callbacks, verbose=self._verbosity(call))
        if data is None:  # fewer examples than replicas: every process evaluates all of them
            return _run_locally(call)
        given = {"x": data, "y": None, "sample_weight": None, "batch_size": None}
        steps = attach(model)
        if are_arrays(call["x"]):
            given["steps"] = None
        else:
            steps.expect_absent_rows()
        own = call.replaced(**given, callbacks=[MetricAverageCallback(), *callbacks], return_dict=True)
        with enter_fit():
            results = steps.evaluate(own.run, epochs_behind(data))
        results = results or flat_results(steps.test_results or {})  # Keras has none of a process without rows
        return results if call["return_dict"] else flatten_metrics(model, results)

    def predict(self, model: Any, call: KerasCall) -> Any:
        """Predicts this process's rows, then gathers the outputs of all processes."""
        self._statistics.average(model)
        call = call.replaced(callbacks=self._callbacks_of_rank(call["callbacks"]), verbose=self._verbosity(call))
        if call["steps"] is not None and are_arrays(call["x"]):
            call = call.replaced(x=cut(call["x"], 0, call["steps"] * (call["batch_size"] or _BATCH)), steps=None)
        distributed = datasets.is_distributed(call["x"])
        with enter_fit():
            return repeated(
                lambda: predict_rows(call, self._replicas.first, self._replicas.count, distributed=distributed)
            )

    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Trains one step on this process's rows."""
        self._statistics.average(model)
        draw_by_rank(model)
        return self._on_batch(model, call, is_test=False)

    def test_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Adds this process's rows to the metrics."""
        self._statistics.average(model)
        return self._on_batch(model, call, is_test=True)

    def predict_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Predicts this process's rows, then gathers the outputs of all processes."""
        self._statistics.average(model)
        with enter_fit():
            return repeated(lambda: predict_rows(call, self._replicas.first, self._replicas.count))

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Writes on the first of the processes that name this path."""
        if not in_fit() and not is_writing() and self._replicas.count > 1:
            self._statistics.average()
            settle_variables()
            settle_aggregated()
        return write_once(write, path)

    def _on_batch(self, model: Any, call: KerasCall, *, is_test: bool) -> Any:
        if self._replicas.count == 1:
            return _run_locally(call)
        rows = count_rows(call["x"])
        steps = attach(model)
        if (model.test_function if is_test else model.train_function) is None:
            check_global_batch(rows, self._replicas.count)  # its first step builds the model and the metrics
        part = self._part_of_batches()
        own = {name: part.of(call[name]) for name in ("x", "y", "sample_weight")}
        if is_test:
            steps.begin_test()
        with enter_fit():
            if part.has_rows_of(rows):
                call.replaced(**own, return_dict=True).run()
            else:
                model.reset_metrics()
            if rows < self._replicas.count and not is_test:
                steps.join()
            results = flat_results(steps.end_test()) if is_test else global_results(model)
        return results if call["return_dict"] else flatten_metrics(model, results)

    # data ---------------------------------------------------------------------------------------

    def _training_data(self, call: KerasCall, x: Any, y: Any, weights: Any) -> Any:
        """Returns what ``fit`` trains on; as ``EpochData`` in elastic jobs, and if an epoch is a part of the data."""
        elastic, part, steps = global_process_set.communicator.elastic, self._part_of_batches(), call["steps_per_epoch"]
        if datasets.is_distributed(x):
            own = self._batches(x)
            return epochs_of_steps(epochs_of_shard(own, part), steps, part) if elastic else own
        sharding, kind = Sharding(part, epoch=call["initial_epoch"]), kind_of(x)
        if are_arrays(x):
            size = call["batch_size"] or _BATCH
            check_global_batch(min(size, count_rows(x)), part.count)
            sharding, x = replace(sharding, batch_size=size), _packed(x, y, weights)
        if call["shuffle"] and kind.shuffles and (sharding.batch_size or kind.has_batches):
            sharding = replace(sharding, shuffle=True, seed=object_of_first(lambda: int(np.random.randint(2**31))))
        if elastic or steps is not None:
            epochs = epochs_of_steps(epochs_of(x, sharding), steps, part)
            if elastic or (isinstance(epochs, StepsOfEpoch) and epochs.doubt is None):
                return epochs
        return _sharded(x, sharding) if sharding.batch_size or sharding.shuffle else self._batches(x)

    def _part(self, x: Any, y: Any, weights: Any, batch_size: int | None, steps: int | None = None) -> Any:
        """Returns this process's part of evaluation data; ``None`` if there are fewer rows than processes.

        In an elastic job each evaluation shards them anew, if any process can read them all.
        """
        elastic = global_process_set.communicator.elastic
        if not are_arrays(x):
            return self._elastic_part(x) if elastic else self._batches(x)
        size = batch_size or _BATCH
        rows = count_rows(x) if steps is None else min(count_rows(x), steps * size)
        data = cut(_packed(x, y, weights), 0, rows)
        if elastic:
            return data_of(epochs_of(data, Sharding(Part(0, 1), size)))
        if rows < self._replicas.count:
            return None
        return _sharded(data, Sharding(self._part_of_batches(), max(size, self._replicas.count)))

    def _elastic_part(self, batches: Any) -> Any:
        doubt = "they are distributed already. Pass the original data set."
        if not datasets.is_distributed(batches):
            epochs = epochs_of(batches, Sharding(Part(0, 1)))
            if epochs.doubt is None:
                return data_of(epochs)
            doubt = epochs.doubt
        if self._replicas.first == 0:
            _log.warning("if a rank is lost, no other one evaluates its part of the data: %s", doubt)
        return self._batches(batches)

    def _part_of_batches(self) -> Part:
        return Part(self._replicas.first, self._replicas.count)

    def _batches(self, data: Any) -> Any:
        return datasets.split_batches(data, self._replicas)

    # callbacks and output -----------------------------------------------------------------------

    def _callbacks(self, given: Any, averaging: MetricAverageCallback) -> list[Any]:
        """Returns choros' callbacks, then the user's, which so see equal weights and global metrics."""
        others = self._callbacks_of_rank(given, elastic=global_process_set.communicator.elastic)
        backups = [each for each in others if isinstance(each, keras.callbacks.BackupAndRestore)]
        others = [each for each in others if each not in backups]
        if global_process_set.communicator.elastic:
            own_backups = [FirstRankCallback(each) for each in backups]
        else:
            own_backups = backups if self._replicas.first == 0 else []
        synchronizing = (_SynchronizeEpoch(), BroadcastGlobalVariablesCallback(0), _AverageStatistics())
        callbacks = [averaging, *own_backups, *synchronizing, *others]
        directory = COMMIT_DIR.read(os.environ)
        return [*callbacks, CommitCallback(directory, callbacks)] if directory else callbacks

    def _callbacks_of_rank(self, given: Any, *, elastic: bool = False) -> list[Any]:
        """Returns the user's callbacks; on ranks other than 0, without those that only write, and with no output.

        With ``elastic``, a rank that becomes rank 0 goes on with these.
        """
        if isinstance(given, keras.callbacks.CallbackList):
            raise ConfigError(
                "callbacks is a CallbackList, to which a strategy cannot add its own callbacks: pass a list instead."
            )
        callbacks = list(keras.tree.flatten(given)) if given else []
        if elastic:
            writers = [each for each in callbacks if type(each).__name__ in _WRITERS]
            wrapped = [FirstRankCallback(each) if each in writers else each for each in callbacks]
            return [VerbosityCallback(callbacks), *wrapped]
        if self._replicas.first == 0:
            return callbacks
        quiet = [each for each in callbacks if type(each).__name__ not in _WRITERS]
        for each in quiet:
            if type(each).__module__.partition(".")[0] == "keras" and hasattr(each, "verbose"):
                each.verbose = 0
        return quiet

    def _verbosity(self, call: KerasCall) -> Any:
        return call["verbose"] if self._replicas.first == 0 else 0


@final
class _SynchronizeEpoch(keras.callbacks.Callback):
    """Broadcasts the initial epoch, which a backup may have changed; only process 0 reads the backup."""

    def on_train_begin(self, logs: Any = None) -> None:
        set_initial_epoch(self.model, object_of_first(lambda: initial_epoch(self.model)))


@final
class _AverageStatistics(keras.callbacks.Callback):
    """Averages the statistics that layers keep of their inputs, such as batch normalisation's, over the processes.

    ``tf.distribute`` averages such a variable when it is read. This callback does so before the next use: at the end of
    an epoch, and before validation.
    """

    def on_test_begin(self, logs: Any = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average()

    def _average(self) -> None:
        layers = [layer for layer in layers_of(self.model) if not has_states_of_rows(layer)]
        statistics = [each for layer in layers for each in statistics_of(layer)]
        average_variables([each for each in statistics if "float" in each.dtype and not aggregates(each)])


def _run_locally(call: KerasCall) -> Any:
    """Runs the call unchanged, on all of its data."""
    with enter_fit():
        return call.run()


def _outside_of_graphs() -> AbstractContextManager[Any]:
    """Returns the block outside of TensorFlow's function graphs, where initial values of variables are computed."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    return tf.init_scope()  # type: ignore[no-any-return]


def _packed(x: Any, y: Any, weights: Any) -> Any:
    """Returns the arrays as the structure of which a step receives rows, in host memory."""
    given = keras.utils.pack_x_y_sample_weight(x, y, weights)
    return map_structure(lambda leaf: adapter_of(leaf).to_host(leaf), given)


def _sharded(data: Any, sharding: Sharding) -> Any:
    return kind_of(data).shard(data, sharding)


def _split_validation(call: KerasCall) -> tuple[Any, Any, Any, Any]:
    """Returns ``x``, ``y``, ``sample_weight`` and the validation data, after applying ``validation_split``."""
    x, y, weights, validation = call["x"], call["y"], call["sample_weight"], call["validation_data"]
    if validation is not None or not call["validation_split"]:
        return x, y, weights, validation
    (x, y, weights), validation = train_validation_split((x, y, weights), validation_split=call["validation_split"])
    return x, y, weights, validation
