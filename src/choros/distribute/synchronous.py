"""Keras' ``fit``, ``evaluate`` and ``predict`` with one replica per process: each gets its rows of every global batch.

::

    the user's call                     the call of Keras' own method, on every process
    fit(x, y, batch_size=64)            this process's rows of each batch of 64; the same order on all
        callbacks=[…]                   equal weights, global metrics; then the given ones, writers on process 0 only
        verbose=1                       on process 0
    evaluate(…)                         its rows; then the metrics' sums are reduced: all processes return the same
    predict(…)                          its rows; then all outputs are gathered, in the order of the input
    save(…)                             process 0 writes, the others wait

Gradients of optimizers that were created in a scope are reduced by where ``apply`` is called::

    in strategy.run(step)     the sum over replicas: the step has divided its loss by the global batch
    in model.fit              the mean over the examples of all replicas
    elsewhere                 an error: only this process's copy of the variables would be updated
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import Reduction, Request, global_process_set
from choros.comm.request import CollectiveSpec
from choros.data.epochs import EpochData
from choros.data.kinds import are_arrays, epochs_behind
from choros.data.rows import check_global_batch, count_rows, cut
from choros.distribute import datasets
from choros.distribute.replicas import Replicas
from choros.distribute.saving import ended_if_unwritten, write_for_lost, write_once
from choros.distribute.scope import current_replica, enter_fit, in_fit, in_replica
from choros.distribute.shares import BATCH, evaluation_data, predict_rows, shares_named, training_data
from choros.distribute.torch_objects import watch_model
from choros.distribute.training import KerasCall, Training
from choros.distribute.types import ReduceOp
from choros.distribute.variables import (
    aggregates,
    assign_initial,
    average_statistics,
    average_variables,
    follow_aggregation,
    follow_statistic,
    release,
    settle_variables,
    share_equally,
)
from choros.elastic import job
from choros.errors import ConfigError, StrategyError
from choros.parallel import ops
from choros.parallel.identical import are_identical
from choros.parallel.moments import RankMoments
from choros.parallel.objects import shared_result
from choros.parallel.reduce.plan import ReduceConfig
from choros.settings import current
from choros.training.callbacks import (
    BroadcastGlobalVariablesCallback,
    FirstRankCallback,
    MetricAverageCallback,
    verbose_on_first_rank,
)
from choros.training.device import placed
from choros.training.distributed_optimizer import reducer_of, wrap
from choros.training.evaluation import repeated
from choros.training.keras_internals.fit import (
    built_before_training,
    epochs_of_any_length,
    flatten_metrics,
    hand_over_shards,
    train_validation_split,
)
from choros.training.keras_internals.models import (
    global_seed_generator,
    has_value,
    innermost,
    layers_of,
    local_value,
    optimizers_of,
    overrides,
    own_variables,
    statistics_of,
)
from choros.training.metrics import flat_results, global_results, logs_of_step, merged_metrics, watch
from choros.training.optimizer_reducer import OptimizerReducer
from choros.training.random_numbers import draw_by_rank, draw_by_replica
from choros.training.run_state import RunCallback
from choros.training.tensorboard import TensorBoard
from choros.training.thread import thread
from choros.training.trainer import attach, spans_ranks

#: Callbacks of Keras that write files or send messages, which only one process must do.
_WRITERS = ("TensorBoard", "CSVLogger", "RemoteMonitor")
_STOP = Request("whether training ends", spec=CollectiveSpec("agreement"))


@final
class SynchronousTraining(Training):
    """Synchronous training by all processes; ``state_owner`` alone keeps optimizers' state, ``None``: all do, with
    ``shard_state`` a slice of it.
    """

    follows_run = True

    def __init__(self, replicas: Replicas, state_owner: int | None, shard_state: bool | None) -> None:
        self._replicas = replicas
        self._state_owner = state_owner
        self._shard_state = shard_state
        hand_over_shards()
        if keras.backend.backend() == "tensorflow":
            from choros.training.tensorflow_iterators import end_in_background

            end_in_background()

    def variable_created(self, variable: Any) -> None:
        """Broadcasts initial values from process 0 unless equal on all; in ``fit`` only once all variables exist.
        Metrics start from zero; where one process keeps the optimizer's state, only that one creates it.
        """
        if not self._replicas.may_differ:
            return
        follow_aggregation(variable)
        if thread.building_slices:  # they are different on each process
            return
        by_metric = variable.synchronization == "on_read" and not aggregates(variable)
        if in_fit() or by_metric or not has_value(variable):
            return
        value = local_value(variable)
        adapter = adapter_of(value)
        if adapter.is_symbolic([value]) or not (variable.trainable or self._state_owner is None):
            return
        host = adapter.to_host(value)
        received = host if are_identical([host]) else ops.broadcast(host, 0, name="initial value")
        if received is not host or aggregates(variable):
            assign_initial(variable, adapter.from_host(np.array(received), value))

    def weight_added(self, weight: Any) -> None:
        """Makes a layer's statistics those of all replicas, outside of ``run`` and ``fit``."""
        if self._replicas.may_differ and not weight.trainable and "float" in weight.dtype and not aggregates(weight):
            follow_statistic(weight)

    def optimizer_created(self, optimizer: Any) -> None:
        """Patches the optimizer to reduce the replicas' gradients."""
        distribute_optimizer(optimizer, self._replicas, self._state_owner, self._shard_state)
        for variable in own_variables(optimizer):
            release(variable)

    def metric_created(self, metric: Any) -> None:
        """Makes ``metric.result()`` cover the examples of all replicas, outside of ``run`` and ``fit``."""
        watch(metric)
        own = metric.result

        @functools.wraps(own)
        def result() -> Any:
            if in_fit() or in_replica():
                return own()
            values = [variable.value for variable in metric.variables]
            if values and adapter_of(values[0]).is_symbolic(values):
                raise StrategyError(
                    f"the result() of the metric {metric.name!r} was read in a compiled function, outside of "
                    "strategy.run: there, ranks cannot exchange what they have. Read it outside of the function."
                )
            with merged_metrics([metric]):
                return own()

        object.__setattr__(metric, "result", result)

    def follow_seeds(self, generator: Any = None) -> None:
        """Makes it draw other numbers on each replica."""
        follow_seeds(generator, self._replicas)

    def combine_moments(self) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
        """Returns what combines the moments of all processes, whose gradients ``run`` adds."""
        return RankMoments().combine if self._replicas.may_differ and in_replica() else None

    def compile(self, model: Any, call: KerasCall) -> None:
        """Compiles the model, and patches its optimizers if they were created outside of the scope."""
        call.run()
        own = [] if model.optimizer is None else [model.optimizer]
        for optimizer in [*own, *optimizers_of(model)]:  # a step of the model's own may use others
            distribute_optimizer(optimizer, self._replicas, self._state_owner, self._shard_state)

    def fit(self, model: Any, call: KerasCall) -> Any:
        """Trains on this process's rows of each global batch."""
        average_statistics(model)
        is_alone = self._replicas.count == 1 and not job.survives()  # a last rank goes on as the others began
        if is_alone and not current().commit_dir:
            return _run_locally(call)
        share_equally(model)
        if keras.backend.backend() == "torch" and overrides(model, "train_step"):
            watch_model(model)
        steps = attach(model)
        x, y, weights, validation = call["x"], call["y"], call["sample_weight"], call["validation_data"]
        if validation is None and (split := call["validation_split"]):
            (x, y, weights), validation = train_validation_split((x, y, weights), validation_split=split)
        batch_size = call["batch_size"]
        data = training_data(call, x, y, weights, self._replicas)
        if not (are_arrays(x) and (validation is None or are_arrays(validation))):
            steps.expect_absent_rows()
        own = data.data if isinstance(data, EpochData) else data
        changes = {"x": own, "y": None, "sample_weight": None, "batch_size": None, "validation_split": 0.0}
        held_out = None
        if validation is not None:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(validation)
            size = call["validation_batch_size"] or batch_size
            held_out = evaluation_data(x, y, weights, size, self._replicas)
            changes["validation_data"] = validation if held_out is None else held_out
            changes["validation_batch_size"] = None
        verbose = self._verbosity(call)
        callbacks = self._callbacks(model, call["callbacks"], MetricAverageCallback(whole_tests=held_out is None))
        admits, directory = global_process_set.communicator.elastic, current().commit_dir
        if admits and call["verbose"]:  # Keras' own progress bar would end with rank 0
            callbacks.append(FirstRankCallback(keras.callbacks.ProgbarLogger(), call["verbose"]))
        run = RunCallback(callbacks, directory, functools.partial(_average, model), admits=admits)
        if admits or directory:
            callbacks = [*callbacks, run]
        if admits:
            # First, so that commits hold all of the last batch, and none of the next.
            between = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, **__: run.begin_batch())
            callbacks, verbose = [between, *callbacks], 0
        changes["callbacks"] = callbacks
        elastic = steps.elastic(data, call["class_weight"]) if isinstance(data, EpochData) else nullcontext()
        named = shares_named(batch_size, self._replicas.count)
        with named, enter_fit(), built_before_training(model), elastic, ended_if_unwritten():
            history = call.replaced(**changes, shuffle=False, verbose=verbose).run()
        if admits:
            run.share_history()
        global_process_set.communicator.barrier()  # the files that process 0 has written exist for all processes
        return history

    def evaluate(self, model: Any, call: KerasCall) -> Any:
        """Evaluates this process's rows, then reduces the metrics' sums."""
        return shared_result(self._evaluated(model, call))

    def _evaluated(self, model: Any, call: KerasCall) -> Any:
        average_statistics(model)
        if self._replicas.count == 1:
            return _run_locally(call)
        data = evaluation_data(
            call["x"], call["y"], call["sample_weight"], call["batch_size"], self._replicas, call["steps"]
        )
        callbacks = self._callbacks_of_rank(call["callbacks"])
        call = call.replaced(callbacks=callbacks, verbose=self._verbosity(call))
        if data is None:  # fewer examples than replicas: every process evaluates all of them
            return _run_locally(call)
        changes = {"x": data, "y": None, "sample_weight": None, "batch_size": None}
        steps = attach(model)
        if are_arrays(call["x"]):
            changes["steps"] = None
        else:
            steps.expect_absent_rows()
        averaging = MetricAverageCallback()
        own = call.replaced(**changes, callbacks=[averaging, *callbacks], return_dict=True)
        with enter_fit():
            results = steps.evaluation.run(own.run, epochs_behind(data))
        results = results or flat_results(steps.evaluation.results or {})  # Keras has none of a process without rows
        results |= averaging.shared
        return results if call["return_dict"] else flatten_metrics(model, results)

    def predict(self, model: Any, call: KerasCall) -> Any:
        """Predicts this process's rows, then gathers the outputs of all processes."""
        average_statistics(model)
        call = call.replaced(callbacks=self._callbacks_of_rank(call["callbacks"]), verbose=self._verbosity(call))
        if call["steps"] is not None and are_arrays(call["x"]):
            call = call.replaced(x=cut(call["x"], 0, call["steps"] * (call["batch_size"] or BATCH)), steps=None)
        datasets.check_shared(call["x"], self._replicas)
        labels = overrides(model, "predict_step")
        with enter_fit(), epochs_of_any_length():
            outputs = repeated(lambda: predict_rows(call, self._replicas, needs_labels=labels))
        return shared_result(outputs)

    def train_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Trains one step on this process's rows."""
        draw_by_rank(model)
        return self._on_batch(model, call, is_test=False)

    def test_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Adds this process's rows to the metrics."""
        return self._on_batch(model, call, is_test=True)

    def predict_on_batch(self, model: Any, call: KerasCall) -> Any:
        """Predicts this process's rows, then gathers the outputs of all processes."""
        average_statistics(model)
        with enter_fit():
            return repeated(lambda: predict_rows(call, self._replicas))

    def save(self, write: Callable[[], Any], path: str) -> Any:
        """Writes on the first of the processes that name this path."""
        settle_variables()
        return write_once(write, path)

    def _on_batch(self, model: Any, call: KerasCall, *, is_test: bool) -> Any:
        average_statistics(model)
        if self._replicas.count == 1:
            return _run_locally(call)
        rows = count_rows(call["x"])
        steps = attach(model)
        if (model.test_function if is_test else model.train_function) is None:
            check_global_batch(rows, self._replicas.count)  # its first step builds the model and the metrics
        steps.expect_batch(rows)
        part = self._replicas.part
        own = {name: part.of(call[name]) for name in ("x", "y", "sample_weight")}
        if is_test:
            steps.evaluation.begin()
        with enter_fit():
            logs: dict[str, Any] = {}
            if part.has_rows_of(rows):
                logs = call.replaced(**own, return_dict=True).run()
            else:
                model.reset_metrics()
            if rows < self._replicas.count and not is_test:
                steps.join()
            results = flat_results(steps.evaluation.end()) if is_test else global_results(model)
            if overrides(model, "test_step" if is_test else "train_step"):
                results = logs_of_step(model, logs, count_rows(own["x"]) if logs else 0, results)
        return results if call["return_dict"] else flatten_metrics(model, results)

    def _callbacks(self, model: Any, given: Any, averaging: MetricAverageCallback) -> list[Any]:
        """Returns choros' callbacks, then the user's, which so see equal weights and global metrics."""
        others = self._callbacks_of_rank(given, elastic=global_process_set.communicator.elastic)
        backups = [each for each in others if isinstance(each, keras.callbacks.BackupAndRestore)]
        others = [each for each in others if each not in backups]
        if global_process_set.communicator.elastic:
            own_backups = [FirstRankCallback(each) for each in backups]
        else:
            own_backups = backups if self._replicas.first == 0 else []
        stops = functools.partial(_stop_together, model)
        agreement = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: write_for_lost(stops))
        return [averaging, *own_backups, *_synchronizing(model), *others, agreement]

    def _callbacks_of_rank(self, given: Any, *, elastic: bool = False) -> list[Any]:
        """Returns callbacks, on ranks other than 0 no writers; with ``elastic`` a new rank 0 goes on with its own."""
        if isinstance(given, keras.callbacks.CallbackList):
            raise ConfigError(
                "callbacks is a CallbackList, to which a strategy cannot add its own callbacks: pass a list instead."
            )
        callbacks = list(keras.tree.flatten(given)) if given else []
        if elastic:
            # Our TensorBoard writes on rank 0 by itself, and counts batches on all, so that the next rank 0 goes on.
            wrapped = [
                FirstRankCallback(each)
                if type(each).__name__ in _WRITERS and not isinstance(each, TensorBoard)
                else each
                for each in callbacks
            ]
            return [verbose_on_first_rank(callbacks), *wrapped]
        if self._replicas.first == 0:
            return callbacks
        quiet = [each for each in callbacks if type(each).__name__ not in _WRITERS]
        for each in quiet:
            if type(each).__module__.partition(".")[0] == "keras" and hasattr(each, "verbose"):
                each.verbose = 0
        return quiet

    def _verbosity(self, call: KerasCall) -> Any:
        return call["verbose"] if self._replicas.first == 0 else 0


def _synchronizing(model: Any) -> list[Any]:
    """Returns the callbacks after which all processes begin with the same values, and layers' statistics are averaged
    at an epoch's end and before validation; ``tf.distribute`` does it when they are read.
    """
    average = functools.partial(_average, model)
    same = keras.callbacks.LambdaCallback(on_epoch_end=average, on_test_begin=average)
    return [same, BroadcastGlobalVariablesCallback(0)]


def _average(model: Any, *_: Any) -> None:
    """Averages the statistics of layers; those of a stateful RNN are the states of single rows."""
    layers = [layer for layer in layers_of(model) if not getattr(layer, "stateful", False)]
    given = [each for layer in layers for each in statistics_of(layer)]
    average_variables([each for each in given if "float" in each.dtype and not aggregates(each)])


def _stop_together(model: Any) -> None:
    """Ends training on all processes if a callback has ended it on one, such as by its own batches or clock."""
    communicator = global_process_set.communicator
    stops = communicator.agree(_STOP, value=int(bool(model.stop_training)))
    model.stop_training = any(stops)


def _run_locally(call: KerasCall) -> Any:
    """Runs the call unchanged, on all of its data."""
    with enter_fit():
        return call.run()


_ADVICE = (
    "Replicas must start from the same values and change them in the same way: create models and optimizers within "
    "`with strategy.scope():`, and apply the same updates on all replicas."
)


def distribute_optimizer(
    optimizer: Any, replicas: Replicas, state_owner: int | None = None, shard_state: bool | None = None
) -> None:
    """Patches ``optimizer``, once, to reduce the replicas' gradients; its ``__init__`` may not have returned yet.
    Processes use the gradient reducer, devices of one process their compiled step; ``state_owner`` is the only
    process that keeps state and applies updates; with ``shard_state`` each has a slice.
    """
    if reducer_of(optimizer) is not None:
        return

    def configure() -> ReduceConfig:
        steps = int(innermost(optimizer).gradient_accumulation_steps or 1)
        return placed(ReduceConfig(micro_batches=steps, compared_step=1))

    def sum_over_devices(gradients: list[Any]) -> list[Any]:
        summed: list[Any] = replicas.all_reduce(ReduceOp.SUM, gradients)  # None stays None
        return summed

    of_devices = sum_over_devices if replicas.local_count > 1 else None
    reducer = OptimizerReducer(
        configure,
        op=_op_here,
        sum_over_devices=of_devices,
        state_owner=state_owner,
        shard_state=shard_state,
        advice=_ADVICE,
    )
    wrap(optimizer, reducer)


def _op_here() -> Reduction:
    """Returns what happens to gradients that are applied here: ``SUM`` in a replica, ``AVERAGE`` in ``fit``."""
    if in_fit():
        return Reduction.AVERAGE
    if current_replica() is None:
        raise StrategyError(
            "an optimizer that was created in a strategy's scope was applied outside of its replicas, which would "
            "update only this process's copy of the variables: apply it in a function that "
            "strategy.run(fn, args=…) runs, or use model.fit."
        )
    return Reduction.SUM


def follow_seeds(generator: Any, replicas: Replicas) -> None:
    """Makes a seed generator draw other numbers on each replica; ``None``: Keras' own, for functions without a seed."""

    def index() -> Any:
        replica = current_replica()  # AutoGraph, which reads this in a tf.function, has no walrus
        if replica is not None:
            return replica.replica_id_in_sync_group
        # Outside of replicas and fit, such as for initial values, all processes draw the same numbers; so does a
        # compiled step that sees the batches of all ranks.
        return replicas.first if in_fit() and not spans_ranks() else 0

    followed = global_seed_generator() if generator is None else generator
    if followed is not None:  # Keras creates its own when it is first used
        draw_by_replica(followed, index)
