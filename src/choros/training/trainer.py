"""The preparation of a model for training: the only module that changes one, by ``attach``; nothing is saved.
On TensorFlow XLA goes off, as a compiled function cannot call the host. A ``LossScaleOptimizer`` becomes the
distributed one, so that ranks reduce *before* it checks for finite values, with the same result on all ranks.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import keras

from choros.comm import ProcessSet, Reduction, global_process_set, has_others, joining, opening
from choros.data.epochs import EpochData
from choros.data.kinds import share_orders
from choros.data.rows import rows_differ
from choros.errors import ConfigError
from choros.observe.progress import page
from choros.parallel.identical import Comparison, are_identical, check_identical
from choros.parallel.structure import map_structure
from choros.training import distributed_optimizer
from choros.training.absent_rows import step_without_rows
from choros.training.distributed_optimizer import move_outwards, receive_weights, reducer_of, trained_by
from choros.training.elastic_epochs import ElasticEpochs, as_in_fit
from choros.training.evaluation import Evaluation
from choros.training.files import complete_files
from choros.training.host_gradients import keras_arrays
from choros.training.keras_internals.fit import (
    JAX_STATE,
    epochs_of_any_length,
    finish_step,
    first_epoch_without_batches,
    sync_jax_state,
)
from choros.training.keras_internals.models import (
    apply_count,
    built_optimizers,
    layers_of,
    metrics_of,
    optimizers_of,
    own_methods,
    seed_generators_of,
    statistics_of,
)
from choros.training.metrics import watch
from choros.training.normalization import is_synchronized, synchronizing_call
from choros.training.optimizer_reducer import OptimizerReducer
from choros.training.replaced import replaced
from choros.training.variables import (
    broadcast_updates,
    broadcast_variables,
    is_aggregated_on_write,
    overwrite,
    value_of,
)
from choros.training.weighting import ModelStep, current_step, run_step, try_step

_STEPS = "_choros_steps"
_ADVICE = (
    "Each rank changes weights by its own rows if a train_step assigns them itself (call the optimizer's apply(), "
    "which reduces gradients first), if one of several optimizers is not distributed, or if a learning rate follows "
    "from a rank's own batches."
)


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


@final
class Steps:
    """One model's steps, which ranks make together, with as many optimizers; ``in_epoch``: more batches may come."""

    def __init__(self, model: Any) -> None:
        self.optimizers: list[Any] = []
        self.in_epoch = False
        self.epochs: ElasticEpochs | None = None
        self.evaluation = Evaluation(model, self)
        self._model = model
        #: On JAX, where steps may be compiled for the devices of all ranks.
        self._spmd: Any = None
        self._reducers: list[OptimizerReducer] = []
        self._rows_may_lack = self._sizes_differ = False
        self._size = 0
        #: ``ModelStep.decided``, and ``ModelStep.own_methods``.
        self._decided: dict[Any, int] = {}
        self._own_methods: frozenset[str] = frozenset()
        #: By kind of step, the wrapper, which may be wrapped once more by the SPMD trainer.
        self._wrapped: dict[str, Any] = {}
        complete_files()

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        return next((reducer.process_set for reducer in self._reducers), global_process_set)

    @property
    def is_spmd(self) -> bool:
        """Whether training steps see the batches of all ranks."""
        return self._spmd is not None and bool(self._spmd.is_in_use)

    @property
    def train_together(self) -> bool:
        """Whether the training step exchanges anything with other ranks."""
        return bool(self.optimizers) and has_others(self.process_set)

    @property
    def batches(self) -> int:
        """The number of batches on which all ranks have trained together: those of the optimizer with the most, since
        ``compile()`` gives a model whose own step uses others one that does not train. A step may have several.
        """
        return max((reducer.reducer.batches for reducer in self._reducers), default=0)

    @property
    def accumulated(self) -> int:
        """The last of these that are micro-batches of an update to come."""
        return max((reducer.reducer.accumulated for reducer in self._reducers), default=0)

    @property
    def last_share(self) -> float | None:
        """This rank's share of the examples in the last training step; ``None`` if it is not known."""
        if self.is_spmd:
            return None
        return next((share for reducer in self._reducers if (share := reducer.reducer.share) is not None), None)

    def prepare(self) -> None:
        """Finds the model's optimizers, and changes the model as this module describes."""
        model = self._model
        if model.train_function is None and model.test_function is None:
            self._begin_anew()
        self._own_methods = own_methods(model)
        for optimizer in optimizers_of(model):
            if move_outwards(optimizer):
                model.train_function = None
        self.optimizers = [optimizer for optimizer in optimizers_of(model) if reducer_of(optimizer) is not None]
        self._reducers = [reducer for each in self.optimizers if (reducer := reducer_of(each)) is not None]
        for number, reducer in enumerate(self._reducers, start=1):
            reducer.reducer.rename(f"optimizer {number}" if number > 1 else "")
            reducer.model = weakref.ref(model)
        if len({reducer.process_set for reducer in self._reducers}) > 1:
            raise ConfigError(
                f"the optimizers of the model {model.name!r} have different process sets, but ranks make a training "
                "step together: give all optimizers of a model the same process set."
            )
        for metric in metrics_of(model):
            watch(metric)
        if self.train_together:
            if keras.backend.backend() == "tensorflow" and model.jit_compile:
                model.jit_compile = False
            self._wrap("train")
        if has_others(global_process_set):
            self._wrap("test")
        if global_process_set.communicator.elastic:
            self.evaluation.wrap()
        if self.optimizers and (mesh := _mesh()) is not None and self._spmd is None:
            from choros.training.spmd_trainer import SpmdTrainer

            def is_shared() -> bool:
                reducer = reducer_of(model.optimizer)
                return reducer is not None and reducer.reduces_all

            self._spmd = SpmdTrainer(model, mesh, global_process_set, is_shared)
            self._wrapped = {kind: getattr(model, f"{kind}_step") for kind in self._wrapped}

    def expect_absent_rows(self) -> None:
        """Prepares for batches without rows here, while others follow: compiled TensorFlow steps must know before."""
        if not self._rows_may_lack and keras.backend.backend() == "tensorflow":
            self._model.train_function = self._model.test_function = None
        self._rows_may_lack = True

    def expect_batch(self, rows: int) -> None:
        """Prepares for one batch with so many rows in all. Once they are others, TensorFlow compiles a step for any
        number, as in plain Keras, on all ranks, also on those whose own part has the size of the last one.
        """
        model, size, self._size = self._model, self._size, rows
        compiled = [kind for kind in ("train", "test") if getattr(model, f"{kind}_function") is not None]
        if keras.backend.backend() == "tensorflow" and compiled and rows != size and not self._sizes_differ:
            self._sizes_differ = True
            for kind in compiled:
                getattr(model, f"make_{kind}_function")(force=True)

    @contextmanager
    def elastic(
        self, data: EpochData, class_weight: Mapping[int, float] | None = None, *, admits: bool = True
    ) -> Iterator[None]:
        """A context of ``fit``, with its arguments, in a job that ranks leave and, if it ``admits``, join."""
        epochs = self.epochs = ElasticEpochs(data, self, class_weight, self._model.steps_per_execution)
        try:
            with (
                epochs.following(),
                opening(admits=admits),
                epochs_of_any_length(lambda: data.goes_on),
                first_epoch_without_batches(self._model),
            ):
                yield
        finally:
            if self.epochs is epochs:
                self.epochs = None

    def begin_epoch(self, epoch: int) -> None:
        """Marks that batches may come, so that the rank joins at their end."""
        self.in_epoch = True
        if self.epochs is not None:
            self.epochs.begin(epoch)
        elif self.train_together:
            share_orders(self.process_set)

    def begin_batch(self) -> None:
        """Ends this rank before its next batch, if it or the job was asked to end, or takes in a new one."""
        finish_step()
        if self.epochs is not None:
            self.epochs.begin_call()

    def end_epoch(self) -> None:
        """Ends the epoch's batches on all ranks at once; what lost ranks have left over is trained on first."""
        self.in_epoch = False
        if self.epochs is None:
            self.end_batches()
        else:
            finish_step()
            self.epochs.finish(self._model)

    def end_batches(self) -> None:
        """``join``; then the gradients of all micro-batches so far are in the optimizers, which may be saved."""
        self.join()
        if self.train_together and not self.is_spmd:
            for optimizer in self.optimizers:
                distributed_optimizer.reduce_early(optimizer)
            sync_jax_state(self._model)  # between two steps the model may lack its weights
            _compare(self._model, self._reducers, self.batches)
            # Ranks with fewer batches have drawn fewer numbers; all go on in the same place, that of a commit.
            if seeds := [each.state for each in seed_generators_of(self._model)]:
                broadcast_variables(seeds, self.process_set.ranks[0], self.process_set)

    def forget_accumulated(self) -> None:
        """Takes back the micro-batches since the last update, as if this rank had not seen them."""
        for optimizer, reducer in zip(self.optimizers, self._reducers, strict=True):
            count = apply_count(optimizer)
            count.assign(count - reducer.reducer.forget_accumulated())

    def cut_anew(self, *, joins: bool = False, have_met: bool = False) -> None:
        """Cuts slices of optimizers' state for the ranks that there are now, if ranks were lost up to the last update,
        or up to now if all ``have_met`` now, or one ``joins``; all ranks call it together, or have joined.
        """
        for optimizer, reducer in zip(self.optimizers, self._reducers, strict=True):
            slices = reducer.slices
            if slices is None:
                continue
            seen = slices.process_set.communicator.launched if have_met else slices.seen
            if joins or seen != slices.holders.members:
                distributed_optimizer.cut_anew(optimizer, self._model)

    def join(self) -> None:
        """Participates in the training steps of the ranks that still have batches, until no rank has any."""
        if self.is_spmd:
            last = self._spmd.join()
            if last is not None:
                broadcast_variables(model_variables(self._model, seeds=True), last)
        elif self.train_together:
            parts = [distributed_optimizer.participation(optimizer) for optimizer in self.optimizers]
            joining.join(
                self.process_set.communicator, {request: part for each in parts for request, part in each.items()}
            )
            trained = [receive_weights(optimizer) for optimizer in self.optimizers]
            if heirs := next(filter(None, trained), ()):
                index = self.process_set.communicator.first_left(heirs, "the only rank with rows in the last step")
                root = self.process_set.ranks[index]
                assigned = self._assigned_together
                if assigned and not are_identical(list(map(value_of, assigned)), self.process_set):
                    broadcast_updates(assigned, root, self.process_set, heirs=heirs)

    # steps ------------------------------------------------------------------------------------------

    @property
    def _assigned_together(self) -> list[Any]:
        """The untrained weights to which all ranks' steps assign the same values, such as a teacher's."""
        others = {id(each) for each in self._assigned_alone}
        others |= {id(each) for optimizer in self.optimizers for each in trained_by(optimizer)}
        others |= {id(each) for reducer in self._reducers for each in reducer.local}
        return [each for each in self._model.weights if id(each) not in others]

    @property
    def _assigned_alone(self) -> list[Any]:
        """The weights to which the training step of each rank assigns values of its own rows, besides metrics."""
        own = [layer for layer in layers_of(self._model) if not is_synchronized(layer)]
        return [each for layer in own for each in statistics_of(layer) if not is_aggregated_on_write(each)]

    def _step(self, kind: str, examples: Any, **batch: Any) -> ModelStep:
        if kind == "train":
            weighted = all(reducer.reducer.config.op is Reduction.AVERAGE for reducer in self._reducers)
            own: dict[str, Any] = {"process_set": self.process_set, "of_all_ranks": self.is_spmd}
        else:
            # A compiled function on several devices cannot call the host.
            weighted = self.train_together and (self._spmd is None or self._spmd.local_devices == 1)
            own = {"process_set": global_process_set, "of_all_ranks": not weighted, "trains": False}
            own["exchanges"] = lambda: self.evaluation.is_running
        own["own_methods"] = self._own_methods
        return ModelStep(examples, weighted=weighted, decided=self._decided, **own, **batch)

    def _meet(self, state: Any) -> None:
        """On JAX, where ranks that have slices of the optimizer's state wait for one that saves alone."""
        for optimizer, reducer in zip(self.optimizers, self._reducers, strict=True):
            if reducer.state is not None and optimizer is self._model.optimizer:
                reducer.state.meet(optimizer, state[JAX_STATE.index("optimizer_variables")])

    def _begin_anew(self) -> None:
        """After ``compile``, which may have given another loss: ``jax.jit`` would find the program of the same step."""
        self._decided.clear()
        for kind, step in self._wrapped.items():
            if getattr(self._model, f"{kind}_step") is step:
                self._wrapped[kind] = functools.partial(step)
                setattr(self._model, f"{kind}_step", self._wrapped[kind])

    def _wrap(self, kind: str) -> None:
        """Wraps ``train_step(data)``, ``train_step(state, data)`` on JAX, or ``test_step``."""
        model, name = self._model, f"{kind}_step"
        own = getattr(model, name)
        if self._wrapped.get(kind) is own:
            return

        @functools.wraps(own)
        def step(*args: Any) -> Any:
            if current_step() is not None:  # wrapped again: the program has replaced the method by one that calls it
                return own(*args)
            args = (*args[:-1], as_in_fit(args[-1]))
            if kind == "train" and _is_compiled(args):
                page.note_compiling()
            is_elastic = kind == "train" and self.epochs is not None
            if (is_elastic or self._sizes_differ) and keras.backend.backend() == "tensorflow":
                args = (*args[:-1], _of_any_size(args[-1]))
            if kind == "train" and keras.backend.backend() == "jax":
                self._meet(args[0])
            rows = _rows(args[-1], parts=bool(self._own_methods) and rows_differ())
            known = frozenset(rows if all(isinstance(each, int) for each in rows) else ())
            examples = rows[0] if len(rows) == 1 else max(known, default=None) or keras.ops.max(rows)
            this = self._step(kind, examples, rows=known, by_part=len(rows) > 1)
            synchronized = replaced(keras.layers.BatchNormalization, call=synchronizing_call)
            with run_step(this), synchronized, _once_read(args[-1], this):
                # A tensor where the step is compiled for batches of any number of rows.
                may_lack = not this.of_all_ranks and (isinstance(examples, int) or self._rows_may_lack)
                absent = examples == 0 if may_lack else False

                def run(*args: Any) -> Any:
                    running: Any = current_step()
                    if absent is False or (running is not this and running.examples):  # rows that it is tried with
                        return own(*args)
                    return step_without_rows(model, own, args, absent, lambda: self._assigned_alone)

                try_step(this, run, args)
                return run(*args)

        self._wrapped[kind] = step
        setattr(model, name, step)
        setattr(model, f"{kind}_function", None)


def _compare(model: Any, reducers: Sequence[OptimizerReducer], batches: int) -> None:
    """Checks that all ranks have the same weights after an epoch: not every step need be an optimizer's."""
    reducer = reducers[0].reducer
    if not reducer.compare_every or any(each.state_owner is not None for each in reducers):
        return
    local = {id(each) for each in itertools.chain(*(each.local for each in reducers))}
    weights = [each for each in model.trainable_weights if id(each) not in local]
    check_identical(
        [each.path for each in weights],
        list(map(value_of, weights)),
        Comparison(max(1, batches), divergence=reducer.divergence),
        advice=_ADVICE,
        process_set=reducer.process_set,
        assign=lambda index, host: overwrite(weights[index], host),
    )


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


@contextmanager
def _once_read(data: Any, step: ModelStep) -> Iterator[None]:
    """TensorFlow operations that wait for a batch: Keras would count an update without one, besides others'."""
    if keras.backend.backend() != "tensorflow" or not step.process_set.communicator.elastic:
        yield
        return
    import tensorflow as tf

    def create_at_once(create: Callable[..., Any], **arguments: Any) -> Any:
        with tf.control_dependencies(None):  # TensorFlow computes initial values before there is a batch
            return create(**arguments)

    leaves = tf.nest.flatten(data, expand_composites=True)
    waiting = tf.control_dependencies([leaf for leaf in leaves if tf.is_tensor(leaf)])
    with waiting, tf.variable_creator_scope(create_at_once):
        yield


def _of_any_size(data: Any) -> Any:
    """Hides the number of rows from TensorFlow: trackers would count by it without the exchange that others make."""
    import tensorflow as tf

    def unknown(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) or tf.executing_eagerly():
            return leaf
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])

    return map_structure(unknown, data)


def _is_compiled(args: Sequence[Any]) -> bool:
    """Whether a step is being compiled; on torch, where none is, nothing is looked at."""
    return keras.backend.backend() != "torch" and keras_arrays().is_symbolic(keras.tree.flatten(args))


def _rows(data: Any, *, parts: bool) -> list[Any]:
    """The number of rows of each of a batch's ``parts``, or of its first array; tensors if they are not known."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return [keras.ops.shape(each)[0] for each in (arrays if parts else arrays[:1])]


def broadcast_global_variables(root_rank: int) -> None:
    """``broadcast_variables`` for all Keras models of this process, including their optimizers' state.

    The name is Horovod's, from TensorFlow's global graph. Models are broadcast in the order of their names, which is
    the same on all ranks that build the same models. Prefer ``broadcast_variables``.

    Args:
        root_rank: a global rank.
    """
    gc.collect()  # Ranks may have released models at different times.
    models = [item for item in gc.get_objects() if issubclass(type(item), keras.Model)]
    inside = {id(layer) for model in models for layer in layers_of(model, include_self=False)}
    for model in sorted((model for model in models if id(model) not in inside), key=lambda model: str(model.name)):
        broadcast_variables(model_variables(model), root_rank)


def model_variables(model: Any, *, seeds: bool = False) -> list[Any]:
    """Weights and optimizers' state, or what counts its steps if one rank keeps it; ``seeds``: a step sees all rows."""
    variables = list(model.variables if seeds else model.weights)
    for optimizer in built_optimizers(model):
        reducer = reducer_of(optimizer)
        is_of_all = reducer is None or reducer.state_owner is None
        variables += optimizer.variables if is_of_all else [apply_count(optimizer)]
    return variables
