"""A run of ``fit`` with which others go on: its state is written to the job's directory after each epoch, and when the
job is asked to end; new ranks receive it, and take the places of lost ones between two steps.

::

    chorosrun --commit-dir runs/commits -np 4 --min-np 2 python train.py

    runs/commits/fit-1/commit-00000003.npz      the script's first call of fit, after its third epoch
    runs/commits/fit-2/…                        its second call, but for those in functions of elastic.run

The same command, started again on any number of ranks, goes on in its call of ``fit``, in the middle of an epoch with
the next batch; calls that are complete return. In a job under way::

    rank 0, 2                                           the new process, at first as if it were rank 1 (local.py)
    step 17, without rank 1                             fit: on_train_begin
    step 18                                               waits
    admit() ◄─────────────────────────────────────────► admit()                  ranks 0, 1, and it is rank 2
    position, state of fit ───────────────────────────► begins fit in that epoch
    step 19 ◄─────────────────────────────────────────► step 19                  with the batches that rank 1 has left

At the beginning of an epoch it gets a shard of its own. In the middle of one, it takes over what a lost rank has left,
if Keras can begin data of this kind there; else it waits for the next epoch.

A state does not depend on the framework: NumPy arrays and plain values, for a ``CommitStore`` or another process::

    RunState(model, callbacks)          when fit begins
      capture(epoch, position) ──►      weights, optimizers' state, seeds, metrics, random streams, callbacks' state
      restore(state) ◄──                in a process that runs the same script, in fit, before its first step
"""

import copy
import inspect
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array, admit, global_process_set, openings
from choros.data.epochs import epochs_of_steps
from choros.data.kinds import epochs_of_shard
from choros.data.rows import Part
from choros.elastic.commit_store import CommitStore, is_plain
from choros.elastic.preemption import end_job
from choros.errors import ConfigError, PeerLostError
from choros.observe.progress import page
from choros.parallel.objects import object_of_first, shared_result
from choros.settings import current
from choros.training.callbacks import EpochCallback, FirstRankCallback, go_on
from choros.training.distributed_optimizer import reducer_of
from choros.training.elastic_epochs import ElasticEpochs
from choros.training.keras_internals.fit import set_initial_epoch, sync_jax_state
from choros.training.keras_internals.models import (
    build_from_batch,
    build_metrics,
    built_optimizers,
    global_seed_generator,
    is_built,
    local_value,
    seed_generators_of,
)
from choros.training.metrics import merged_metrics
from choros.training.random_numbers import random_streams, set_random_streams
from choros.training.sliced_optimizer import assign_whole, has_slices, whole_outlines, whole_values
from choros.training.variables import derive_again

_log = logging.getLogger("choros")
_calls = itertools.count(1)
#: What ``fit`` gives callbacks; and what Keras' own set in each process: the sign of ``min_delta``, with a comparison,
#: which is a function; a log's file, and whether it begins; of TensorBoard, its writers and its profiler.
_OF_PROCESS = frozenset(
    [
        *("_model", "params", "_params", "validation_data", "min_delta"),
        *("append_header", "csv_file", "writer"),
        *("_writers", "_prev_summary_state", "_is_tracing", "_profiler_started"),
    ]
)


@final
class RunState:
    """Captures and restores a run of ``fit``; a callback's ``state_dict()`` and ``load_state_dict(state)`` decide, or
    its attributes that are plain values. One with the name of a constructor's argument is configuration, and stays as
    the script has set it, unless the training has changed it.

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> run = RunState(model, [keras.callbacks.EarlyStopping("loss")])
        >>> state = run.capture(epoch=3, position={"step": 17})
        >>> state["epoch"], state["position"]
        (3, {'step': 17})
        >>> run.restore(state)
    """

    def __init__(self, model: Any, callbacks: Sequence[Any], source: str = "the state") -> None:
        """``source``: what it restores from, for errors."""
        self._model = model
        self._source = source
        self._callbacks = [each for each in callbacks if type(each).__name__ != "ProgbarLogger"]
        self._configured = [_configuration(each) for each in self._callbacks]

    def capture(self, *, epoch: int, position: Any = None, metrics: bool = True, joins: bool = False) -> dict[str, Any]:
        """Copies this process's state, and asks others for their slices of an optimizer's, if they have any. For a rank
        that ``joins``, no metrics, which would count twice, and no state that is in slices.
        """
        model = self._model
        sync_jax_state(model)
        callbacks = zip(_keys(self._callbacks), self._callbacks, self._configured, strict=True)
        return {
            "epoch": epoch,
            "position": copy.deepcopy(position),
            "weights": _values(model.weights),
            "optimizers": [
                list(whole_values(each)) if _has_state(each) and not (joins and has_slices(each)) else []
                for each in built_optimizers(model)
            ],
            "seeds": _values([each.state for each in seed_generators_of(model)]),
            "global_seed": _values([] if (own := global_seed_generator()) is None else [own.state]),
            "metrics": _values(model.metrics_variables) if metrics and not joins else None,
            "stop_training": bool(model.stop_training),
            "random": random_streams(),
            "callbacks": {key: _captured(callback, configured) for key, callback, configured in callbacks},
        }

    def restore(self, state: dict[str, Any], batch: Any = None) -> None:
        """Continues from a state of the same script, between steps, after all callbacks' ``on_train_begin``, which
        resets them. TensorFlow needs ``batch`` if there are metrics. A ConfigError (another model) has changed nothing.
        """
        model = self._model
        sync_jax_state(model)
        if batch is not None:
            build_metrics(model, lambda: batch)
        optimizers = built_optimizers(model)
        if len(optimizers) != len(state["optimizers"]):
            raise self._misfit(f"it has {len(state['optimizers'])} optimizers, and the model has {len(optimizers)}")
        seeds = [each.state for each in seed_generators_of(model)]
        parts = [("weight", model.weights, state["weights"]), ("seed", seeds, state["seeds"])]
        pairs = zip(optimizers, state["optimizers"], strict=True)
        own = [(each, values) for each, values in pairs if _has_state(each) and (values or not has_slices(each))]
        if state["global_seed"]:
            parts.append(("global seed", [global_seed_generator(create=True).state], state["global_seed"]))
        if state["metrics"] is not None:
            parts.append(("metric variable", model.metrics_variables, state["metrics"]))
        for part in parts:
            self._check(*part)
        for number, (optimizer, values) in enumerate(own, start=1):
            self._check("variable", whole_outlines(optimizer), values, f" of optimizer {number}")
        for _, variables, values in parts:
            for variable, value in zip(variables, values, strict=True):
                current = local_value(variable)
                variable.assign(adapter_of(current).from_host(np.array(value), current))
            derive_again(variables)
        for optimizer, values in own:
            assign_whole(optimizer, values)
        model.stop_training = state["stop_training"]
        for key, callback in zip(_keys(self._callbacks), self._callbacks, strict=True):
            if key in state["callbacks"]:
                _restore(callback, copy.deepcopy(state["callbacks"][key]))
        set_random_streams(state["random"])

    def _check(self, kind: str, variables: Sequence[Any], values: Sequence[Array], of: str = "") -> None:
        expected = [(tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)) for variable in variables]
        found = [(value.shape, str(value.dtype)) for value in values]
        pairs = zip(found, expected, strict=False)
        for number, ((shape, dtype), (own_shape, own_dtype)) in enumerate(pairs):
            if (shape, dtype) != (own_shape, own_dtype):
                in_model = f"{own_dtype} of shape {own_shape} in the model"
                raise self._misfit(f"{kind} {number}{of} is {dtype} of shape {shape} in it, and {in_model}")
        if len(found) != len(expected):
            raise self._misfit(f"it has {len(found)} {kind}s{of}, and the model has {len(expected)}")

    def _misfit(self, where: str) -> ConfigError:
        return ConfigError(
            f"{self._source} does not fit the model {self._model.name!r}: {where}. Go on with the same model, compiled "
            "in the same way, or use another --commit-dir for a new training."
        )


def _no_other_is_left() -> dict[str, Any]:
    raise PeerLostError("all others were lost while this rank joined, and with them the state of the training.")


def _has_state(optimizer: Any) -> bool:
    """Whether this rank has an optimizer's state, or a slice of it."""
    reducer = reducer_of(optimizer)
    return reducer is None or reducer.has_state


def _values(variables: Sequence[Any]) -> list[Array]:
    values = [local_value(variable) for variable in variables]
    return [np.array(adapter_of(value).to_host(value)) for value in values]


# callbacks --------------------------------------------------------------------------------------


def _keys(callbacks: Sequence[Any]) -> Iterator[str]:
    """Returns a name for each callback that does not depend on callbacks of other classes, which ranks may not have."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = f"{type(callback).__module__}.{type(callback).__qualname__}"
        yield f"{name} {counts[name]}"
        counts[name] += 1


def _configuration(callback: Any) -> dict[str, Any]:
    classes = [each for each in type(callback).__mro__ if issubclass(each, keras.callbacks.Callback)]
    arguments = {name for each in classes for name in inspect.signature(each).parameters}
    return {name: copy.copy(value) for name, value in vars(callback).items() if name in arguments}


def _captured(callback: Any, configured: dict[str, Any]) -> Any:
    if hasattr(callback, "state_dict"):
        return copy.deepcopy(callback.state_dict())
    attributes = {name: value for name, value in vars(callback).items() if name not in _OF_PROCESS and is_plain(value)}
    return {
        name: copy.deepcopy(value)
        for name, value in attributes.items()
        if name not in configured or not _equal(value, configured[name])
    }


def _restore(callback: Any, state: Any) -> None:
    if hasattr(callback, "load_state_dict"):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    try:
        return bool(one == other)
    except ValueError:  # arrays inside
        return False


# the callback ---------------------------------------------------------------------------------------------


class RunCallback(EpochCallback):
    """Restores the last commit in ``directory``, if one is given, when ``fit`` begins, and writes one after each epoch;
    takes new ranks in if it ``admits``. The last callback of all ranks, with the other ``callbacks``' state. A commit
    in the middle of an epoch (``ElasticEpochs``) has all ranks' metrics so far; rank 0 goes on with them.
    """

    _run: RunState

    def __init__(
        self, callbacks: Sequence[Any], directory: str, average: Callable[[], None], *, admits: bool = False
    ) -> None:
        """``average`` makes the statistics of layers those of all ranks."""
        super().__init__()
        self._average = average
        self._callbacks = [each.callback if isinstance(each, FirstRankCallback) else each for each in callbacks]
        # In another opening, the state of which this call is a part is what is committed.
        commits = directory and not openings()
        self._store = CommitStore(Path(directory) / f"fit-{next(_calls)}") if commits else None
        if self._store is not None and self._store.has_commits:
            for each in self._callbacks:
                go_on(each)
        self._admits = admits
        #: The state with which this rank begins, of a commit or of the others, until an epoch has begun.
        self._begins: dict[str, Any] | None = None
        #: That from which an epoch goes on in its middle, until all callbacks, and its data, have begun it.
        self._goes_on: dict[str, Any] | None = None
        #: The epoch at whose beginning there is something to commit.
        self._next: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Goes on from the last commit, which rank 0 reads, if there is one; a new rank waits until it is taken in."""
        super().on_train_begin(logs)
        is_nested = openings() > 1
        if is_nested:
            self._store = None
        if self._store is None and not self._admits:
            return
        source = "the state" if self._store is None else f"the commit in {self._store.directory}"
        self._run = RunState(self.model, [*self._callbacks, self.model.history], source)
        epochs = self._steps.epochs
        if epochs is not None:
            epochs.commit = None if self._store is None else self._commit
            epochs.admit = partial(self._admit, epochs) if self._admits and not is_nested else None
        if self._admits and epochs is not None and not is_built(self.model):
            batch = epochs.example_batch()
            if batch is not None:
                build_from_batch(self.model, batch)
        if self._admits and is_built(self.model):
            # On all ranks: TensorFlow builds them in the first step, before which one may join.
            built_optimizers(self.model)
        if not global_process_set.communicator.is_new:
            self._restore_last()
        elif self._admits and epochs is not None:
            self._begin_late(epochs)

    def _restore_last(self) -> None:
        last = None if self._store is None else object_of_first(self._store.load_last)
        if self._store is None or last is None:
            return
        self._begins = last
        self._run.restore(last | {"metrics": None})
        epoch, position, where = last["epoch"], last["position"] or {}, self._store.directory
        set_initial_epoch(self.model, epoch)
        if self._steps.epochs is not None and position:
            self._steps.epochs.resume(position)
        elif position.get("ledger"):
            raise ConfigError(
                f"the commit in {where} is in the middle of an epoch, where only an elastic job can go on: start it by "
                "chorosrun with --min-np."
            )
        if global_process_set.communicator.rank != 0:
            return
        if epoch >= self.params["epochs"]:
            _log.warning("all epochs of this fit are in the commit in %s: to train anew, choose another one.", where)
        else:
            after = f"in epoch {epoch + 1}" if position.get("ledger") else f"after epoch {epoch}"
            _log.warning("training goes on %s, from the commit in %s.", after, where)

    def _begin_late(self, epochs: ElasticEpochs) -> None:
        """Waits until this rank is taken in; if the others are in a later call of ``fit``, this one ends."""
        if not admit():
            set_initial_epoch(self.model, self.params["epochs"])
            return
        received = self._begins = object_of_first(_no_other_is_left)
        epochs.take_over(received["position"])
        set_initial_epoch(self.model, received["epoch"])
        if not is_built(self.model):
            build_from_batch(self.model, epochs.example_batch())
        if received["in_epoch"]:  # the job may end before this rank's first step
            build_metrics(self.model, epochs.example_batch)
        self._run.restore(received)
        self._steps.cut_anew(joins=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Commits the epoch before: Keras' history, which comes after all other callbacks, has it now. Restores what
        callbacks, and history, have forgotten when training, or an epoch that is under way, began.
        """
        super().on_epoch_begin(epoch, logs)
        state, self._begins = self._begins, None
        if state is not None:
            batch = None
            if state["metrics"] is not None and self._steps.epochs is not None:
                batch = self._steps.epochs.example_batch()
            if batch is None or global_process_set.communicator.rank != 0:
                state |= {"metrics": None}
            self._run.restore(state, batch)
            self._goes_on = state if state["in_epoch"] else None
        if self._next == epoch:
            with page.counted_as("committed"):
                self._write(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Marks that there is something to commit."""
        super().on_epoch_end(epoch, logs)
        self._next, self._goes_on = epoch + 1, None

    def on_train_end(self, logs: Any = None) -> None:
        """Commits that this call of ``fit`` is complete, also if it was stopped early; the next begins as it says."""
        set_initial_epoch(self.model, None)
        if self._store is None:
            return
        if self._steps.epochs is not None:
            self._steps.epochs.ledger = None  # no epoch goes on
        if self._next is not None:
            self._write(self.params["epochs"])
        if self._steps.epochs is not None and self._steps.epochs.job_ends:
            end_job(lambda: self._write(self.params["epochs"]))

    def share_history(self) -> None:
        """Gives a new rank that has passed this call of ``fit`` by the others' history; after the opening."""
        history = self.model.history
        history.epoch, history.history = shared_result((history.epoch, history.history))

    def begin_batch(self) -> None:
        """Ends this rank before its next batch, if it is time, or takes in a new one."""
        self.restore_again()
        self._steps.begin_batch()

    def restore_again(self) -> None:
        """Restores the state once more after the beginning of an epoch that goes on in its middle, where callbacks zero
        counts or set rates, and a ``DataLoader`` draws a number; call it before anything else happens in it.
        """
        state, self._goes_on = self._goes_on, None
        if state is not None:
            self._run.restore(state)

    def _admit(self, epochs: ElasticEpochs, epoch: int) -> bool:
        """Takes in a new rank, between two steps, if one waits; sends it the state of rank 0, which is an older one."""
        if self._begins is not None and epochs.is_late:
            self._run.restore(self._begins)  # callbacks have set it back when training began
            if self._begins["in_epoch"]:  # the others are in the middle of it
                return False
            self._begins = None
        if not admit():
            return False
        # If a rank is lost while it is sent, the ledger is another one.
        object_of_first(lambda: self._capture(epoch, in_epoch=epochs.ledger is not None, joins=True))
        self._steps.cut_anew(joins=True)
        return True

    def _commit(self) -> None:
        """Commits between two steps, or in a validation, whose metrics are not needed: it will be made again."""
        if self._steps.epochs is None or self._steps.epochs.ledger is None:
            return
        with page.counted_as("committed"):
            if self._steps.evaluation.is_running:
                self._write(self._steps.epochs.ledger.epoch, in_epoch=True)
            else:
                sync_jax_state(self.model)
                build_metrics(self.model, self._steps.epochs.example_batch)  # there may have been no step yet
                self._average()
                with merged_metrics(self.model.metrics):
                    self._write(self._steps.epochs.ledger.epoch, in_epoch=True, metrics=True)

    def _write(self, epoch: int, *, in_epoch: bool = False, metrics: bool = False) -> None:
        if self._store is not None and global_process_set.communicator.rank == 0:
            self._store.write(self._capture(epoch, in_epoch=in_epoch, metrics=metrics))

    def _capture(self, epoch: int, *, in_epoch: bool, **what: bool) -> dict[str, Any]:
        position = None if self._steps.epochs is None else self._steps.epochs.position
        return self._run.capture(epoch=epoch, position=position, **what) | {"in_epoch": in_epoch}


@final
class ElasticCallback(RunCallback):
    """Trains on what lost ranks have left over, before an epoch ends; has no effect in jobs that are not elastic.

    With ``chorosrun --commit-dir``, the state is committed after each epoch, and when the job is asked to end; the same
    command goes on from there. Put this callback first.

    Args:
        data: the data set that ``fit`` receives, as ``hvd.shard(…, batch_size=…)`` has returned it.
        callbacks: the other callbacks that ``fit`` receives, whose state is committed, too. If they are given, lost
            ranks are replaced: the new ones receive that state.

    Example:
        >>> ElasticCallback([]).data
        []
    """

    def __init__(self, data: Any, callbacks: Sequence[Any] | None = None) -> None:
        admits = callbacks is not None and global_process_set.communicator.elastic
        super().__init__(callbacks or (), current().commit_dir, lambda: None, admits=admits)
        self.data = data
        self._context = ExitStack()
        weakref.finalize(self, self._context.close)  # before Python ends, if an exception ends fit

    def on_train_begin(self, logs: Any = None) -> None:
        """Follows what happens to the ranks, and goes on from the last commit, if there is one."""
        communicator = global_process_set.communicator
        if communicator.elastic:
            part = Part(communicator.rank, communicator.size)
            # Without steps_per_epoch, Keras says how many batches the data have.
            epochs = epochs_of_steps(epochs_of_shard(self.data, part), self.params.get("steps"), part)
            self._context.enter_context(self._steps.elastic(epochs, admits=self._admits))
        super().on_train_begin(logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Ends this rank, if it is time."""
        self.begin_batch()

    def on_test_begin(self, logs: Any = None) -> None:
        """Ends the epoch's batches, in ``fit``."""
        self.restore_again()
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the epoch's batches."""
        self.restore_again()
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Ends that."""
        super().on_train_end(logs)
        self._context.close()
        if self._admits:
            self.share_history()
