"""The preparation of a model for distributed training: the only module that changes a model.

A choros callback calls ``attach`` before Keras builds the training function. It changes the following on *this* model
object; nothing of it is saved with the model:

1. ``train_step`` and ``test_step`` run as a ``ModelStep`` (``weighting.py``), from which every distributed optimizer
   that they apply, and every loss, learns the number of examples in the batch;
2. on TensorFlow, XLA is switched off: a compiled function cannot call the host;
3. a ``LossScaleOptimizer`` that ``compile`` put around the distributed optimizer becomes the distributed one, so that
   ranks reduce gradients *before* it checks whether they are finite, with the same result on all ranks;
4. a ``BatchNormalization(synchronized=True)`` normalises by the moments of all ranks (``normalization.py``);
5. with the xla engine, on JAX, its steps run on the devices of all ranks (``spmd_trainer.py``). They then compute the
   gradients, the metrics and the random numbers of the global batch, and no gradient is reduced on the host. An
   optimizer that does not reduce all gradients over all ranks (a process set, local variables) reduces them through
   the host, as with other engines;
6. what it saves is complete at any time (``files.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, final

import keras

from choros.comm import ProcessSet, Reduction, Request, global_process_set, opening
from choros.elastic.preemption import leave_if_asked
from choros.errors import ConfigError, PeerLostError
from choros.observe.progress import page
from choros.parallel import moments
from choros.parallel.data import EpochData, epochs_behind, rows_differ
from choros.parallel.identical import are_identical
from choros.parallel.reduce import joining
from choros.parallel.structure import map_structure
from choros.training import aggregation, distributed_optimizer, elastic_evaluation, weighting
from choros.training.absent_rows import step_without_rows
from choros.training.aggregation import is_aggregated_on_write
from choros.training.distributed_optimizer import move_outwards, receive_weights, reducer_of
from choros.training.elastic_epochs import ElasticEpochs
from choros.training.elastic_evaluation import ElasticEvaluation, RanksHaveChanged
from choros.training.files import complete_files
from choros.training.keras_internals import (
    abandon_test,
    apply_count,
    epochs_of_any_length,
    finish_step,
    first_epoch_without_batches,
    layers_of,
    metrics_of,
    optimizers_of,
    own_methods,
    statistics_of,
    trained_variables,
)
from choros.training.metric_states import watch
from choros.training.metrics import global_metrics
from choros.training.model_variables import model_variables
from choros.training.normalization import is_synchronized, synchronizing
from choros.training.optimizer_reducer import OptimizerReducer
from choros.training.variables import broadcast_updates, broadcast_variables, value_of
from choros.training.weighting import ModelStep, current_step, run_step, try_step

__all__ = ["Steps", "attach", "is_spmd", "spans_ranks", "steps_of"]

T = TypeVar("T")

_SPMD = "_choros_spmd_trainer"
_STEPS = "_choros_steps"


def attach(model: Any) -> Steps:
    """Prepares ``model`` for steps that all ranks make together; call it again when it may have other optimizers."""
    if not hasattr(model, _STEPS):
        # Bypasses Keras' attribute tracking: the object is not part of the model.
        object.__setattr__(model, _STEPS, Steps(model))
    steps = steps_of(model)
    steps.prepare()
    return steps


def steps_of(model: Any) -> Steps:
    """The steps of a model for which ``attach`` was called."""
    steps: Steps = getattr(model, _STEPS)
    return steps


def is_spmd(model: Any) -> bool:
    """Whether the model's training steps see the batches of all ranks."""
    trainer = getattr(model, _SPMD, None)
    return trainer is not None and trainer.is_in_use


@final
class Steps:
    """The training and test steps of one model, which ranks make together.

    Attributes:
        optimizers: the distributed optimizers that its training step may apply; other ranks have as many.
        in_epoch: whether more batches may come this epoch.
        epochs: what this rank trains on in a job that ranks leave and join; ``None`` in others.
        in_test: whether all ranks are in an evaluation together.
        test_results: the results of the last evaluation by all ranks together; ``None`` before its end.
    """

    def __init__(self, model: Any) -> None:
        self.optimizers: list[Any] = []
        self.in_epoch = False
        self.epochs: ElasticEpochs | None = None
        self._rows_may_lack = False
        #: ``ModelStep.decided``.
        self._decided: dict[Any, int] = {}
        self.test_results: dict[str, Any] | None = None
        self.in_test = False
        self._model = model
        self._evaluation = ElasticEvaluation(model)
        #: By kind of step, the wrapper, which may be wrapped once more by the SPMD trainer.
        self._wrapped: dict[str, Any] = {}
        self._evaluate: Any = None
        complete_files(model)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        return next((reducer.reducer.config.process_set for reducer in self._reducers), global_process_set)

    @property
    def train_together(self) -> bool:
        """Whether the training step exchanges anything with other ranks."""
        return bool(self.optimizers) and _active(self.process_set)

    @property
    def batches(self) -> int:
        """The number of batches on which all ranks have trained together."""
        return next((reducer.reducer.batches for reducer in self._reducers), 0)

    @property
    def accumulated(self) -> int:
        """The last of these that are micro-batches of an update to come."""
        return max((reducer.reducer.accumulated for reducer in self._reducers), default=0)

    @property
    def last_share(self) -> float | None:
        """This rank's share of the examples in the last training step; ``None`` if it is not known."""
        if is_spmd(self._model):
            return None
        return next((share for reducer in self._reducers if (share := reducer.reducer.share) is not None), None)

    def prepare(self) -> None:
        """Finds the model's optimizers, and changes the model as this module describes."""
        model = self._model
        for optimizer in optimizers_of(model):
            if move_outwards(optimizer):
                model.train_function = None
        self.optimizers = [optimizer for optimizer in optimizers_of(model) if reducer_of(optimizer) is not None]
        for number, reducer in enumerate(self._reducers, start=1):
            reducer.name = f"optimizer {number}" if number > 1 else ""
        self._check_process_sets()
        for metric in metrics_of(model):
            watch(metric)
        if self.train_together:
            if keras.backend.backend() == "tensorflow" and model.jit_compile:
                model.jit_compile = False
            self._wrap("train", self._train_step)
        if _active(global_process_set):
            self._wrap("test", self._test_step)
        if global_process_set.communicator.elastic:
            self._wrap_evaluate()
        if self.optimizers and (mesh := _mesh()) is not None and not hasattr(model, _SPMD):
            _make_spmd(model, mesh)
            self._wrapped = {kind: getattr(model, f"{kind}_step") for kind in self._wrapped}

    def expect_absent_rows(self) -> None:
        """Prepares for batches in which this rank has no rows, while others follow.

        TensorFlow's compiled steps take them into account only where that is known before; others always do.
        """
        if not self._rows_may_lack and keras.backend.backend() == "tensorflow":
            self._model.train_function = self._model.test_function = None
        self._rows_may_lack = True

    @contextmanager
    def elastic(self, data: EpochData, class_weight: Mapping[int, float] | None = None) -> Iterator[None]:
        """A context of ``fit`` in a job that ranks leave and join; the arguments are those of ``fit``."""
        epochs = self.epochs = ElasticEpochs(data, self, class_weight)
        epochs.start()
        try:
            with opening(), epochs_of_any_length(lambda: data.goes_on), first_epoch_without_batches(self._model):
                yield
        except PeerLostError:
            epochs.commit_after_loss()
            raise
        finally:
            epochs.stop()
            if self.epochs is epochs:
                self.epochs = None

    def begin_training(self) -> None:
        """Forgets what an earlier ``fit`` was doing when an exception ended it, such as the loss of a rank."""
        self.in_epoch = self.in_test = False
        self._model.__dict__.pop("get_metrics_result", None)

    def begin_epoch(self, epoch: int) -> None:
        """Marks that batches may come, so that the rank joins at their end."""
        self.in_epoch = True
        if self.epochs is not None:
            self.epochs.begin(epoch)

    def begin_batch(self) -> None:
        """Ends this rank before its next batch, if it or the job was asked to end, or takes in a new one."""
        finish_step()
        if self.epochs is not None:
            self.epochs.between_steps()

    def end_epoch(self) -> None:
        """Ends the epoch's batches on all ranks at once; what lost ranks have left over is trained on first."""
        self.in_epoch = False
        if self.epochs is None:
            self.end_batches()
        else:
            self.epochs.finish(self._model)

    def end_batches(self) -> None:
        """``join``; then the gradients of all micro-batches so far are in the optimizers, which may be saved."""
        self.join()
        if self.train_together and not is_spmd(self._model):
            for optimizer in self.optimizers:
                distributed_optimizer.reduce_early(optimizer)

    def forget_accumulated(self) -> None:
        """Takes back the micro-batches since the last update, as if this rank had not seen them."""
        for optimizer, reducer in zip(self.optimizers, self._reducers, strict=True):
            count = apply_count(optimizer)
            count.assign(count - reducer.reducer.forget_accumulated())

    def join(self) -> None:
        """Participates in the training steps of the ranks that still have batches, until no rank has any."""
        if is_spmd(self._model):
            last = getattr(self._model, _SPMD).join()
            if last is not None:
                broadcast_variables(model_variables(self._model, seeds=True), last)
        elif self.train_together:
            participation = _participation(self.process_set)
            for optimizer in self.optimizers:
                participation.update(distributed_optimizer.participation(optimizer))
            joining.join(self.process_set.communicator, participation)
            trained = [receive_weights(optimizer) for optimizer in self.optimizers]
            if heirs := next(filter(None, trained), ()):
                index = self.process_set.communicator.first_left(heirs, "the only rank with rows in the last step")
                root = self.process_set.ranks[index]
                assigned = self._assigned_together
                if assigned and not are_identical(list(map(value_of, assigned)), self.process_set):
                    broadcast_updates(assigned, root, self.process_set, heirs=heirs)

    # tests ------------------------------------------------------------------------------------------

    def evaluate(self, evaluate: Callable[[], T], data: EpochData | None) -> T:
        """Returns ``evaluate()``; in an elastic job, of the ranks that are there until its end.

        Args:
            evaluate: evaluates this rank's part.
            data: the data, which are sharded over the ranks; ``None`` if nothing can.
        """
        if not global_process_set.communicator.elastic:
            return evaluate()
        return self._evaluation.run(evaluate, data, 0 if self.epochs is None else self.epochs.epoch)

    def begin_test(self) -> None:
        """Begins an evaluation by all ranks together, whose metrics are those of all examples on every rank.

        So ``evaluate`` returns them, and passes them to callbacks.
        """
        self._evaluation.begin()
        self.in_test, self.test_results = _active(global_process_set), None
        if self.in_test:
            # Bypasses Keras' attribute tracking; Keras' method is called in each step, and once at the end.
            object.__setattr__(self._model, "get_metrics_result", self._metrics_result)

    def begin_test_batch(self) -> None:
        """In an elastic job, ends the evaluation before its end if ranks were lost, or this rank or the job is to end.

        Raises:
            RanksHaveChanged: it begins again.
            SystemExit: this rank ends.
        """
        if not (self.in_test and global_process_set.communicator.elastic and self._evaluation.begin_batch()):
            return
        finish_step()
        self._evaluation.meet()
        if self._evaluation.has_changed or (self.epochs is not None and self.epochs.job_ends):
            self._join_test()  # ranks without batches come back, too
            raise RanksHaveChanged
        leave_if_asked()

    def end_test(self) -> dict[str, Any]:
        """Ends it when no rank has batches left; returns the results of all metrics.

        Raises:
            RanksHaveChanged: it begins again.
            SystemExit: the job ends.
        """
        self._model.__dict__.pop("get_metrics_result", None)
        if self.in_test:
            self._join_test()
            self.in_test = False
        if self.test_results is None:
            results = global_metrics(self._model)
            self._evaluation.check()
            self.test_results = results
        return self.test_results

    def _join_test(self) -> None:
        """Participates in the others' test steps until no rank goes on with this evaluation."""
        everyone = global_process_set
        joining.join(everyone.communicator, {**_participation(everyone), **elastic_evaluation.participation()})
        if self.epochs is not None:
            self.epochs.end_if_job_ends()
        self._evaluation.check()

    def _metrics_result(self) -> Any:
        return self.end_test() if current_step() is None else type(self._model).get_metrics_result(self._model)

    # steps ------------------------------------------------------------------------------------------

    @property
    def _assigned_together(self) -> list[Any]:
        """The weights to which the training steps of all ranks assign the same values, besides those they train.

        Such as a teacher's, which follow those that are trained.
        """
        others = {id(each) for each in self._assigned_alone}
        others |= {id(each) for optimizer in self.optimizers for each in trained_variables(optimizer)}
        return [each for each in self._model.weights if id(each) not in others and not self._is_local(each)]

    @property
    def _assigned_alone(self) -> list[Any]:
        """The weights to which the training step of each rank assigns values of its own rows, besides metrics."""
        own = [layer for layer in layers_of(self._model) if not is_synchronized(layer)]
        return [each for layer in own for each in statistics_of(layer) if not is_aggregated_on_write(each)]

    def _is_local(self, variable: Any) -> bool:
        return any(reducer.is_local(variable) for reducer in self._reducers)

    def _once_read(self, data: Any) -> AbstractContextManager[Any]:
        """A block of TensorFlow whose operations run once there is a batch.

        Keras' step counts an update even if it finds no more batches. Ranks of an elastic job that have no more make
        the updates of the others, and count those.
        """
        if keras.backend.backend() != "tensorflow" or not self.process_set.communicator.elastic:
            return nullcontext()
        import tensorflow as tf

        leaves = tf.nest.flatten(data, expand_composites=True)
        block: AbstractContextManager[Any] = tf.control_dependencies([leaf for leaf in leaves if tf.is_tensor(leaf)])
        return block

    def _absent(self, examples: Any) -> Any:
        """Whether a batch has no rows; a tensor where the step is compiled for batches of any number of rows."""
        if isinstance(examples, int):
            return examples == 0
        return examples == 0 if self._rows_may_lack else False

    @property
    def _reducers(self) -> list[OptimizerReducer]:
        return [reducer for optimizer in self.optimizers if (reducer := reducer_of(optimizer)) is not None]

    def _check_process_sets(self) -> None:
        if len({reducer.reducer.config.process_set for reducer in self._reducers}) > 1:
            raise ConfigError(
                f"the optimizers of the model {self._model.name!r} have different process sets, but ranks make a "
                "training step together: give all optimizers of a model the same process set."
            )

    def _train_step(self, examples: Any, **batch: Any) -> ModelStep:
        weighted = all(reducer.reducer.config.op is Reduction.AVERAGE for reducer in self._reducers)
        own: dict[str, Any] = {"of_all_ranks": is_spmd(self._model), "decided": self._decided}
        return ModelStep(examples, self.process_set, weighted, **own, **batch)

    def _test_step(self, examples: Any, **batch: Any) -> ModelStep:
        # A compiled function on several devices cannot call the host.
        weighted = self.train_together and not _has_local_mesh(self._model)
        exchanges, decided = lambda: self.in_test, self._decided
        own: dict[str, Any] = {"of_all_ranks": not weighted, "exchanges": exchanges, "decided": decided}
        return ModelStep(examples, global_process_set, trains=False, **own, **batch)

    def _wrap(self, kind: str, make_step: Callable[..., ModelStep]) -> None:
        """Wraps ``train_step(data)``, ``train_step(state, data)`` on JAX, or ``test_step``."""
        model, name = self._model, f"{kind}_step"
        timed = kind == "train" and keras.backend.backend() == "torch"  # others trace it once
        own = getattr(model, name)
        if self._wrapped.get(kind) is own:
            return
        own_names = own_methods(model)

        @functools.wraps(own)
        def step(*args: Any) -> Any:
            if current_step() is not None:  # wrapped again: the program has replaced the method by one that calls it
                return own(*args)
            if timed:
                page.enter_train_step()
            if kind == "train" and self.epochs is not None and keras.backend.backend() == "tensorflow":
                args = (*args[:-1], _of_any_size(args[-1]))
            rows = _rows(args[-1], parts=rows_differ() and bool(own_names))
            known = frozenset(rows if all(isinstance(each, int) for each in rows) else ())
            examples = rows[0] if len(rows) == 1 else max(known, default=None) or keras.ops.max(rows)
            this = make_step(examples, rows=known, by_part=len(rows) > 1, own_methods=own_names)
            with run_step(this), synchronizing(), self._once_read(args[-1]):
                absent = False if this.of_all_ranks else self._absent(examples)

                def run(*args: Any) -> Any:
                    if absent is False:
                        return own(*args)
                    return step_without_rows(model, own, args, absent, lambda: self._assigned_alone)

                try_step(this, run, args)
                done = run(*args)
            if timed:
                page.leave_train_step()
            return done

        self._wrapped[kind] = step
        setattr(model, name, step)
        setattr(model, f"{kind}_function", None)

    def _wrap_evaluate(self) -> None:
        """Wraps ``evaluate``, which ``fit`` calls, too, for data that each evaluation can shard anew."""
        model, own = self._model, self._model.evaluate
        if own is self._evaluate:
            return

        @functools.wraps(own)
        def evaluate(x: Any = None, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                try:
                    return own(x, *args, **kwargs)
                except RanksHaveChanged:
                    abandon_test(kwargs.get("callbacks"))
                    raise

            return self.evaluate(run, epochs_behind(x))

        self._evaluate = evaluate
        # Bypasses Keras' attribute tracking: the function is not part of the model.
        object.__setattr__(model, "evaluate", evaluate)


def _participation(process_set: ProcessSet) -> dict[Request, Callable[[Sequence[int]], None]]:
    """How a rank without rows participates in what the steps of the others exchange, besides gradients."""
    parts = (module.participation(process_set) for module in (weighting, moments, aggregation))
    return {request: part for each in parts for request, part in each.items()}


def _active(process_set: ProcessSet) -> bool:
    return bool(process_set.included()) and process_set.communicator.may_have_others


def spans_ranks() -> bool:
    """Whether training steps are compiled for the devices of all ranks, which must compile the same step."""
    return _mesh() is not None


def _mesh() -> Any:
    """The mesh of all ranks' devices; ``None`` if arrays cannot span them or there is only one."""
    if keras.backend.backend() != "jax":
        return None
    from choros.comm.engines import xla

    mesh = xla.mesh()
    return None if mesh is None or mesh.size == 1 else mesh


def _make_spmd(model: Any, mesh: Any) -> None:
    from choros.training.mesh_ranks import Ranks
    from choros.training.spmd_trainer import SpmdTrainer

    # Bypasses Keras' attribute tracking: the trainer is not part of the model.
    object.__setattr__(model, _SPMD, SpmdTrainer(model, mesh, Ranks(), lambda: _trains_with_all(model)))


def _has_local_mesh(model: Any) -> bool:
    return hasattr(model, _SPMD) and getattr(model, _SPMD).local_devices > 1


def _trains_with_all(model: Any) -> bool:
    reducer = reducer_of(model.optimizer)
    return reducer is not None and reducer.reduces_all


def _of_any_size(data: Any) -> Any:
    """The batch as if TensorFlow did not know its number of rows before, as in ``fit``.

    Keras' trackers of several losses count by it if it is known, which needs no exchange, but it is in steps on what
    lost ranks have left over (``train_on_batch``): a new rank makes them in ``fit``.
    """
    import tensorflow as tf

    def unknown(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) or tf.executing_eagerly():
            return leaf
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])

    return map_structure(unknown, data)


def _rows(data: Any, *, parts: bool) -> list[Any]:
    """The number of rows of each of a batch's ``parts``, or of its first array; tensors if they are not known."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return [keras.ops.shape(each)[0] for each in (arrays if parts else arrays[:1])]
