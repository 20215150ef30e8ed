"""Keras' internals: everything that choros uses of ``keras.src`` and of private attributes, for Keras 3.15.

Each function documents what it accesses and why no public name suffices. If a new version of Keras changes one of
these, only this module needs to change (``tests/test_keras_internals.py`` enforces that).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
from keras.src import api_export, tree
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.common.variables import Variable as AnyVariable
from keras.src.layers.layer import Layer
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group
from keras.src.losses import loss as losses
from keras.src.losses.loss import apply_mask
from keras.src.metrics import reduction_metrics
from keras.src.metrics.metric import Metric
from keras.src.models.functional import Functional, functional_like_constructor
from keras.src.models.model import Model
from keras.src.models.sequential import Sequential
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.random.seed_generator import global_seed_generator as make_global_seed_generator
from keras.src.saving import serialization_lib
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.trainer import Trainer
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.tracking import no_automatic_dependency_tracking

from choros.durable import discard, unfinished

__all__ = [
    "JAX_STATE",
    "AnyVariable",
    "BaseOptimizer",
    "MultiOptimizer",
    "Trainer",
    "abandon_test",
    "accumulators",
    "apply_count",
    "apply_mask",
    "build_from_batch",
    "build_metrics",
    "built_before_training",
    "decays",
    "deserialize_sharing",
    "drop_empty_gradients",
    "exclude_from_weight_decay",
    "export_like",
    "file_writers",
    "finish_step",
    "flatten_metrics",
    "global_seed_generator",
    "hand_over_arrays",
    "has_metrics",
    "has_states_of_rows",
    "has_value",
    "in_stateless_scope",
    "in_symbolic_scope",
    "initial_epoch",
    "inner_optimizers",
    "innermost",
    "is_built",
    "is_embedding",
    "is_functional",
    "jax_state",
    "layers_of",
    "learning_rate_of",
    "load_optimizer_weights_from_hdf5_group",
    "local_value",
    "make_backups_atomic",
    "messages_about",
    "metrics_of",
    "no_automatic_dependency_tracking",
    "normalize_by",
    "note_trained_variables",
    "optimizers_of",
    "order_tracked",
    "own_methods",
    "own_statistics",
    "own_variables",
    "patched_reductions",
    "patched_windows",
    "put_jax_state",
    "pythonify_logs",
    "read_gathered_rows_only",
    "seed_generators_of",
    "serialize_sharing",
    "set_initial_epoch",
    "share_directories",
    "single_metrics",
    "statistics_of",
    "strategy_aware_classes",
    "sync_jax_state",
    "torch_device",
    "tracked",
    "train_validation_split",
    "trained_variables",
    "unsynced_jax_state",
    "user_attributes",
]

_MISSING = object()
_TRACKED = ("_layers", "_trainable_variables", "_non_trainable_variables")
#: Attributes that Keras sets in ``fit``, ``evaluate`` and ``predict``.
_LATE_ATTRIBUTES = frozenset(
    ("_eval_epoch_iterator", "_jax_state", "history", "stop_evaluating", "stop_predicting", "stop_training")
)

# Imported from keras.src unchanged:
#   AnyVariable, BaseOptimizer, Trainer   the base classes of variables, optimizers and models: keras.Variable is the
#                                         framework's subclass, and Trainer has no public name.
#   MultiOptimizer                        has no public name.
#   apply_mask                            how losses merge a mask with sample weights.
#   in_stateless_scope                    whether variables have the values of a function's arguments.
#   in_symbolic_scope                     whether Keras only computes shapes.
#   load_optimizer_weights_from_hdf5_group, train_validation_split, pythonify_logs
#                                         how load_model and fit handle .h5 files, validation_split and logs.
#   no_automatic_dependency_tracking      for methods that set lists on an optimizer, as for Keras' own ``build``.

#: The parts of the state that Keras' training step on JAX takes and returns, in this order.
JAX_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")

#: The mark of models that ``fit`` has built from a batch.
_BUILT = "_choros_built"
#: The attribute of a file of weights with the epoch of a backup.
_BACKUP = "choros_backup"


# optimizers -------------------------------------------------------------------------------------


def innermost(optimizer: Any) -> Any:
    """The optimizer inside a ``LossScaleOptimizer``, or the given one; the public name exists on that class only."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers inside a ``LossScaleOptimizer`` or a ``MultiOptimizer``, which has them in a private list."""
    scaled = getattr(optimizer, "inner_optimizer", None)
    return [*([] if scaled is None else [scaled]), *getattr(optimizer, "_inner_optimizers", ())]


def trained_variables(optimizer: Any) -> list[Any]:
    """The variables that a built optimizer trains, in its order; ``optimizer.variables`` are its own state."""
    variables: list[Any] = optimizer._trainable_variables
    return variables


def note_trained_variables(optimizer: Any, variables: Iterable[Any]) -> None:
    """``build`` without any state: sets what ``BaseOptimizer.build`` sets besides the variables it creates."""
    optimizer._trainable_variables = list(variables)
    for index, variable in enumerate(optimizer._trainable_variables):
        optimizer._trainable_variables_indices[optimizer._var_key(variable)] = index
    optimizer.built = True


def apply_count(optimizer: Any) -> Any:
    """The variable that counts calls of ``apply``; the public ``iterations`` counts updates, which may be fewer."""
    return innermost(optimizer)._iterations


def learning_rate_of(optimizer: Any) -> Any:
    """The variable, schedule or function of the learning rate; the public ``learning_rate`` is its value."""
    return optimizer._learning_rate


def accumulators(optimizer: Any) -> Sequence[Any]:
    """The variables that accumulate gradients with ``gradient_accumulation_steps``; they have no public name."""
    accumulated: Sequence[Any] = getattr(optimizer, "_accumulated_gradients", ())
    return accumulated


def own_variables(optimizer: Any) -> list[Any]:
    """A ``LossScaleOptimizer``'s own variables; its public ``variables`` include the inner optimizer's."""
    variables: list[Any] = optimizer._variables
    return variables


def drop_empty_gradients(optimizer: Any, gradients: Any, variables: Any) -> Any:
    """The gradients that are not ``None`` and their variables, with Keras' warnings and errors for the others."""
    return optimizer._filter_empty_gradients(gradients, variables)


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether weight decay applies to ``variable``; in Keras only the setter is public."""
    return bool(optimizer._use_weight_decay(variable))


def exclude_from_weight_decay(optimizer: Any, variables: Iterable[Any]) -> None:
    """The setter, for variables alone: the public one also resets the name patterns."""
    optimizer._exclude_from_weight_decay = {optimizer._var_key(variable) for variable in variables}


def is_embedding(variable: Any) -> bool:
    """Whether ``variable`` is the table of a ``keras.layers.Embedding``, which gives it this name."""
    return bool(getattr(variable, "name", None) == "embeddings")


def export_like(derived: type, base: type) -> None:
    """Registers ``derived`` under the public name of ``base``, by which Keras finds a class when it loads a file."""
    if (public_name := api_export.REGISTERED_OBJS_TO_NAMES.get(base)) is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[derived] = public_name


# losses and metrics -----------------------------------------------------------------------------


@contextmanager
def patched_reductions(
    reduce_loss: Callable[..., Any],
    reduce_samples: Callable[..., Any],
    sum_added: Callable[..., Any],
    compute_loss: Callable[..., Any],
) -> Iterator[None]:
    """A context in which losses, ``Mean``, ``Sum`` and values of ``add_loss`` are reduced with these functions.

    Args:
        reduce_loss: in place of ``reduce_weighted_values``, through which all of Keras' losses go; receives Keras' own
            function, then its arguments.
        reduce_samples: in place of ``reduce_to_samplewise_values``, through which all means and sums go; likewise.
        sum_added: in place of the model's method that sums each value of ``add_loss``; likewise.
        compute_loss: in place of the one through which Keras' own steps call ``compute_loss``; likewise.
    """
    patches = (
        (losses, "reduce_weighted_values", reduce_loss),
        (reduction_metrics, "reduce_to_samplewise_values", reduce_samples),
        (Trainer, "_aggregate_additional_loss", sum_added),
        (Trainer, "_compute_loss", compute_loss),
    )
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for (owner, name, replacement), (_, _, own) in zip(patches, kept, strict=True):
        setattr(owner, name, _calling(replacement, own))
    try:
        yield
    finally:
        for owner, name, own in kept:
            setattr(owner, name, own)


def _calling(replacement: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or method, that calls ``replacement(own, …)``."""
    return lambda *args, **kwargs: replacement(own, *args, **kwargs)


# models, layers, variables ----------------------------------------------------------------------


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """The layers at all depths; the public ``layers`` are those at the first depth."""
    return list(model._flatten_layers(include_self=include_self))


def metrics_of(model: Any) -> list[Any]:
    """All metrics, also those given to ``compile``, which the public ``metrics`` lacks until the first batch."""
    compiled = model._compile_metrics
    given = () if compiled is None else (compiled._user_metrics, compiled._user_weighted_metrics)
    return [each for each in (*model.metrics, *tree.flatten(given)) if isinstance(each, Metric)]


def single_metrics(metrics: Iterable[Any]) -> list[Any]:
    """Replaces the one metric that holds all those given to ``compile`` by them; it has no public name."""
    return [single for each in metrics for single in (each.metrics if isinstance(each, CompileMetrics) else [each])]


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that are attributes of a model or of its layers, also in lists and dicts; Keras knows one only."""
    found: dict[int, Any] = {}

    def collect(value: Any) -> None:
        if isinstance(value, BaseOptimizer):
            found[id(value)] = value
        elif isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                collect(item)

    for layer in layers_of(model):
        collect({name: value for name, value in vars(layer).items() if not name.startswith("_")})
    return list(found.values())


def own_statistics(layer: Any) -> list[Any]:
    """A layer's own statistics, such as a moving mean; the public name includes seeds and the inner layers."""
    statistics: list[Any] = layer._non_trainable_variables
    return statistics


def statistics_of(layer: Any) -> list[Any]:
    """A layer's own statistics of rows; those of ``SpectralNormalization`` are of its weights."""
    return [] if isinstance(layer, keras.layers.SpectralNormalization) else own_statistics(layer)


def has_states_of_rows(layer: Any) -> bool:
    """Whether the layer's own statistics are the states of single rows: those of a stateful RNN."""
    return bool(getattr(layer, "stateful", False))


def normalize_by(layer: Any, moments: Callable[[Any, Any, Sequence[int], Callable[[], Any]], Any]) -> None:
    """Makes a ``BatchNormalization`` normalise by other moments in training; they have no public method.

    Args:
        layer: the layer.
        moments: receives the inputs, their mask or ``None``, the axes of the rows, and a function that returns Keras'
            own moments of these inputs, not synchronised; returns the mean and the variance, flat.
    """
    given = layer._moments

    def replaced(inputs: Any, mask: Any) -> Any:
        axes = layer._reduction_axes

        def own() -> Any:
            return keras.ops.moments(inputs, axes=axes) if mask is None else given(inputs, mask)

        return moments(inputs, mask, axes, own)

    # Bypasses Keras' attribute tracking: the function is not part of the layer.
    object.__setattr__(layer, "_moments", replaced)


def has_value(variable: Any) -> bool:
    """Whether the variable has a value yet; reading the public ``value`` would create one."""
    return variable._value is not None


def local_value(variable: Any) -> Any:
    """This process's value; the public ``value`` may be overridden, to communicate."""
    return variable._value


def read_gathered_rows_only() -> None:
    """On TensorFlow: makes ``tf.gather``, and so an ``Embedding``, read the rows of a variable and not all of it.

    ``tf.gather`` calls the method ``sparse_read`` of what it gathers from. TensorFlow's variables have one, Keras' do
    not: they are read as a whole first, and that copies a variable that is updated by rows. The values are the same.
    """

    def sparse_read(variable: Any, indices: Any, name: str | None = None) -> Any:
        import tensorflow as tf

        with AutocastScope(None):
            value = variable.value
        return variable._maybe_autocast(tf.gather(value, indices, name=name))

    if not hasattr(keras.Variable, "sparse_read"):
        keras.Variable.sparse_read = sparse_read


def flatten_metrics(model: Any, results: dict[str, Any]) -> Any:
    """``results`` as ``evaluate`` returns them without ``return_dict``."""
    return model._flatten_metrics_in_order(results)


def initial_epoch(model: Any) -> int:
    """The epoch at which the current ``fit`` begins, as ``BackupAndRestore`` sets it."""
    epoch: int = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Makes the current ``fit`` begin at ``epoch``."""
    model._initial_epoch = epoch


@contextmanager
def epochs_of_any_length(goes_on: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A context in which ``fit`` and ``evaluate`` read their data to the end, and expect no number of batches.

    Of data of unknown length Keras would expect as many as in the first epoch, which may begin in the middle. With
    ``steps_per_epoch``, it would go on with the iterator of the epoch before. On JAX, data without batches would leave
    the variables without values, or with older ones.

    Args:
        goes_on: whether it shall go on with that, at the beginning of an epoch.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    catch, warn, begin = EpochIterator.catch_stop_iteration, EpochIterator._interrupted_warning, EpochIterator.__iter__

    @contextmanager
    def catching(iterator: Any) -> Iterator[None]:
        known = iterator._num_batches
        with catch(iterator):
            yield
        iterator._num_batches = known

    def warning(iterator: Any) -> None:
        if iterator.steps_per_epoch is not None:
            warn(iterator)

    def beginning(iterator: Any) -> Any:
        if not goes_on():
            iterator._current_iterator = None
        return begin(iterator)

    EpochIterator.catch_stop_iteration, EpochIterator._interrupted_warning = catching, warning
    EpochIterator.__iter__ = beginning
    try:
        with _kept_jax_state():
            yield
    finally:
        EpochIterator.catch_stop_iteration, EpochIterator._interrupted_warning = catch, warn
        EpochIterator.__iter__ = begin


@contextmanager
def _kept_jax_state() -> Iterator[None]:
    """A context in which Keras, which takes the variables' values before it asks for the first batch, can return them.

    It returns them by ``jax_state_sync``.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    from keras.src.backend.jax.trainer import JAXTrainer

    take = JAXTrainer._get_jax_state

    def taking(model: Any, *, purge_model_variables: bool = False, **wanted: bool) -> Any:
        state = take(model, purge_model_variables=purge_model_variables, **wanted)
        if purge_model_variables:
            model._jax_state = dict(zip((each for each in JAX_STATE if wanted.get(each)), state, strict=True))
        return state

    JAXTrainer._get_jax_state = taking
    try:
        yield
    finally:
        JAXTrainer._get_jax_state = take


@contextmanager
def first_epoch_without_batches(model: Any) -> Iterator[None]:
    """A context in which the first epoch of ``fit`` may have no batches, on JAX: Keras needs the logs of one.

    Callbacks then see one batch, after which the metrics are what they were.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    make, has_logs = model.make_train_function, False
    own: Any = None

    def train(state: Any, iterator: Any) -> Any:
        nonlocal has_logs
        try:
            results = own(state, iterator)
        except StopIteration:
            if has_logs:
                raise
            model.jax_state_sync()
            results = model.get_metrics_result(), state
        has_logs = True
        return results

    def wrap(force: bool = False) -> None:
        nonlocal own
        make(force)
        if model.train_function is not train:
            own, model.train_function = model.train_function, train

    if model.train_function is not None:  # fit has made it already
        wrap()
    with _replaced(model, "make_train_function", wrap):
        try:
            yield
        finally:
            if model.train_function is train:
                model.train_function = own


def own_methods(model: Any) -> frozenset[str]:
    """Those of the methods that train which a model's class has overridden; Keras has no flag for it."""
    names, own = ("train_step", "test_step", "compute_loss"), f"{keras.__name__}.src."
    return frozenset(name for name in names if not getattr(type(model), name).__module__.startswith(own))


@functools.cache
def hand_over_arrays() -> None:
    """Makes Keras hand rows of data sets ``of_arrays`` to a step as it hands those of arrays.

    Of a ``PyDataset``, which they are, a step would receive ``(x,)`` and not ``x``, on PyTorch ``[x, y]`` and not
    ``(x, y)``; TensorFlow would refuse lists in it, of which arrays become tuples. What Keras reads data sets with has
    no public name.
    """
    from keras.src.trainers import data_adapters

    own = data_adapters.get_data_adapter

    class ArraysAdapter(data_adapters.PyDatasetAdapter):
        def _standardize_batch(self, batch: Any) -> Any:
            if keras.backend.backend() == "tensorflow":
                batch = tree.lists_to_tuples(batch)
            return super()._standardize_batch(batch) if isinstance(batch, (list, tuple)) else batch

        def get_torch_dataloader(self) -> Any:
            loader = super().get_torch_dataloader()
            loader.collate_fn = lambda batch: batch
            return loader

    def get_data_adapter(x: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = own(x, *args, **kwargs)
        if getattr(x, "of_arrays", False):
            adapter.__class__ = ArraysAdapter
        return adapter

    data_adapters.get_data_adapter = get_data_adapter


def finish_step() -> None:
    """Waits until the last step has ended, which JAX runs on while Python goes on."""
    if keras.backend.backend() == "jax":
        import jax

        jax.effects_barrier()


def build_from_batch(model: Any, batch: Any = None, iterator: Any = None) -> bool:
    """Creates the variables and metrics that a model does not have yet, for batches like this one, as ``fit`` does.

    On TensorFlow, where no model is built before its first step, one with a ``train_step`` of its own has them created
    by that: it is traced, not run. Only the step knows what of the batch is whose input, and such a model may have no
    ``call``. A step that runs eagerly cannot be traced: Keras calls the model, if that succeeds.

    Returns:
        Whether they exist.
    """
    has_own_step = keras.backend.backend() == "tensorflow" and type(model).train_step is not Model.train_step
    if has_own_step and not model.run_eagerly:
        import tensorflow as tf

        if batch is None:
            batch = next(next(iter(iterator))[-1])
        step = tf.function(tf.autograph.experimental.do_not_convert(lambda batch: model.train_step(batch)))
        model._autoconvert_optionals(step.get_concrete_function)(batch)
        return True
    try:
        model._symbolic_build(iterator=iterator, data_batch=batch)
    except Exception:
        if has_own_step:
            return False
        raise
    return True


@contextmanager
def keeping_metrics(model: Any) -> Iterator[None]:
    """A block in which ``train_on_batch`` adds to the model's metrics, which it would reset."""
    with _replaced(model, "reset_metrics", lambda: None):
        yield


def build_metrics(model: Any, batch: Any) -> None:
    """Creates the variables of the metrics given to ``compile``, which TensorFlow would create in the first step."""
    metrics = model._compile_metrics
    if model.built and metrics is not None and not metrics.built:
        build_from_batch(model, batch)


def has_metrics(model: Any) -> bool:
    """Whether the variables of the metrics given to ``compile`` exist."""
    return model._compile_metrics is None or model._compile_metrics.built


def abandon_test(callbacks: Any) -> None:
    """Takes back ``on_test_begin``: a list of callbacks counts it until ``on_test_end``."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks._on_end()


def is_built(model: Any) -> bool:
    """Whether a model and all layers that it uses have their variables, when ``fit`` begins.

    ``model.build(shape)`` of a subclass without a ``build`` of its own marks the model as built, not its layers. On
    TensorFlow they are then built by the first batch, unless by ``built_before_training``.
    """

    def waits(layer: Any) -> bool:
        is_container = type(layer).build is Layer.build and type(layer).call is Model.call
        return not (layer.built or is_container)

    is_early = hasattr(model, _BUILT) or (model.built and keras.backend.backend() != "tensorflow")
    return is_early or not any(map(waits, layers_of(model)))


@contextmanager
def built_before_training(model: Any) -> Iterator[None]:
    """A context in which ``fit`` builds a model of unknown input shape from its first batch, before it trains.

    Keras does so on the other frameworks. On TensorFlow it would build the model in the first step, which is too late:
    replicas must have identical weights before it.
    """

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if not is_built(model) and build_from_batch(model, data_batch, iterator):
            object.__setattr__(model, _BUILT, True)

    with _replaced(model, "_maybe_symbolic_build", build) if keras.backend.backend() == "tensorflow" else nullcontext():
        yield


def file_writers() -> list[tuple[Any, str]]:
    """The functions that write a model's files, as module or class and name; all public ones call these."""
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    return [
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
        (keras.Model, "export"),
    ]


@contextmanager
def messages_about(name: str, final: str) -> Iterator[None]:
    """A context in which Keras prints ``final`` in place of ``name``, under which it writes a file."""
    from keras.src.utils import io_utils

    own = io_utils.print_msg
    io_utils.print_msg = lambda message, *args, **kwargs: own(message.replace(name, final), *args, **kwargs)
    try:
        yield
    finally:
        io_utils.print_msg = own


def sync_jax_state(model: Any) -> None:
    """On JAX, in ``fit``: gives the model its values; Keras reads them again before its next step."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def share_directories() -> None:
    """Makes callbacks, which all processes have, accept a directory that another process creates at the same time."""
    from keras.src.utils import file_utils

    create = file_utils.makedirs

    def makedirs(path: str) -> None:
        try:
            create(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    file_utils.makedirs = makedirs


def make_backups_atomic(
    is_complete: Callable[[Any], bool], amended: Callable[[Callable[[Path], None]], AbstractContextManager[None]]
) -> None:
    """Makes ``BackupAndRestore`` save weights and epoch in one step: it writes two files.

    The file of the weights has the epoch, too, and ``fit`` begins at that one. Without choros, Keras reads the other.

    Args:
        is_complete: whether a model's files are complete at any time; for others, nothing changes.
        amended: a block in which a function completes each file that is saved.
    """
    from keras.src.callbacks.backup_and_restore import BackupAndRestore
    from keras.src.utils import file_utils

    own_load, own_save, own_end = (
        BackupAndRestore._load_model,
        BackupAndRestore._save_model,
        BackupAndRestore.on_train_end,
    )

    def is_ours(backup: Any) -> bool:
        return is_complete(backup.model) and not file_utils.is_remote_path(backup.backup_dir)

    def save(backup: Any) -> None:
        if not is_ours(backup):
            own_save(backup)
            return
        metadata = json.dumps({"epoch": backup._current_epoch, "batch": backup._last_batch_seen})
        weights, text = Path(backup._weights_path), Path(backup._training_metadata_path)
        weights.parent.mkdir(parents=True, exist_ok=True)
        if backup.double_checkpoint:
            for file, copy in ((weights, backup._prev_weights_path), (text, backup._prev_training_metadata_path)):
                if file.exists():
                    with unfinished(copy) as name:
                        shutil.copyfile(file, name)

        def note_epoch(file: Path) -> None:
            import h5py

            with h5py.File(file, "r+") as opened:
                opened.attrs[_BACKUP] = metadata

        with amended(note_epoch):
            backup.model.save_weights(filepath=str(weights), overwrite=True)
        with unfinished(text) as name:
            name.write_text(metadata)

    def load(backup: Any) -> None:
        own_load(backup)
        if is_ours(backup) and os.path.exists(backup._weights_path):
            import h5py

            with h5py.File(backup._weights_path) as file:
                metadata = file.attrs.get(_BACKUP)
            if metadata is not None:
                set_initial_epoch(backup.model, json.loads(metadata)["epoch"])

    def on_train_end(backup: Any, logs: Any = None) -> None:
        if not is_ours(backup):
            own_end(backup, logs)
        elif backup.delete_checkpoint and os.path.exists(backup.backup_dir):
            discard(backup.backup_dir)

    BackupAndRestore._load_model, BackupAndRestore._save_model = load, save
    BackupAndRestore.on_train_end = functools.wraps(own_end)(on_train_end)


# random numbers ---------------------------------------------------------------------------------


def seed_generators_of(model: Any) -> list[Any]:
    """The seed generators of a model's layers at all depths; they have no public name."""
    return [generator for layer in layers_of(model) for generator in getattr(layer, "_seed_generators", ())]


def global_seed_generator(*, create: bool = False) -> Any:
    """The generator of random functions that are given no seed; ``None`` if there is none yet, unless it is created."""
    return make_global_seed_generator() if create else get_global_attribute(GLOBAL_SEED_GENERATOR)


# saving -----------------------------------------------------------------------------------------


def serialize_sharing(layer: Any, given: Mapping[int, Any]) -> Any:
    """The configuration of a layer or a model, not compiled; in it, the layers in ``given`` are only their ids.

    The public ``serialize_keras_object`` includes what models were compiled with, and notes sharing within a file only.
    """
    with ExitStack() as stack:
        stack.enter_context(serialization_lib.ObjectSharingScope())
        for each in given.values():
            serialization_lib.record_object_after_serialization(each, {"module": ""})
            stack.enter_context(_replaced(each, "get_config", lambda name=each.name: {"name": name}))
        for each in layers_of(layer):
            if getattr(each, "compiled", False):
                stack.enter_context(_replaced(each, "compiled", False))
        return serialization_lib.serialize_keras_object(layer)


def deserialize_sharing(config: Any, given: Mapping[int, Any], custom_objects: Mapping[str, Any]) -> Any:
    """The layer or model of a configuration of ``serialize_sharing``; ``given`` has the layers that are ids in it.

    A functional model refers to the calls of its layers by number, so it is made as if they had not been called before.
    """
    calls = {key: list(layer._inbound_nodes) for key, layer in given.items()}
    with serialization_lib.ObjectSharingScope():
        for key, layer in given.items():
            layer._inbound_nodes.clear()
            serialization_lib.record_object_after_deserialization(layer, key)
        try:
            return serialization_lib.deserialize_keras_object(config, dict(custom_objects), safe_mode=False)
        finally:
            for key, layer in given.items():
                layer._inbound_nodes[:0] = calls[key]


def is_functional(layer: Any) -> bool:
    """Whether a layer is a model that Keras describes by its graph: sequential, or functional without a constructor."""
    return isinstance(layer, Sequential) or (
        isinstance(layer, Functional) and bool(functional_like_constructor(type(layer)))
    )


def user_attributes(layer: Any) -> dict[str, Any]:
    """The attributes that a user's class has set, without those that Keras and the framework have set."""
    plain: Any = Model() if isinstance(layer, Model) else Layer()
    if isinstance(layer, Model):
        plain.compile()
    own = frozenset(vars(plain)) | _LATE_ATTRIBUTES
    # PyTorch keeps modules apart, and among them one of Keras' own.
    modules = {name: value for name, value in vars(layer).get("_modules", {}).items() if name != "torch_params"}
    attributes = {**vars(layer), **modules}
    return {name: value for name, value in attributes.items() if name not in own and not name.startswith("_self_")}


def tracked(layer: Any) -> dict[str, list[Any]]:
    """The layers and variables that a layer has, in the order in which Keras has found them in its attributes."""
    return {name: list(getattr(layer, name)) for name in _TRACKED}


def order_tracked(layer: Any, order: Mapping[str, Sequence[Any]]) -> None:
    """Makes the order the same as in another process, where ``tracked`` was called."""
    for name, items in order.items():
        getattr(layer, name)[:] = items


@contextmanager
def _replaced(item: Any, name: str, value: Any) -> Iterator[None]:
    """The block in which an attribute has another value; bypasses Keras' attribute tracking."""
    own = vars(item).get(name, _MISSING)
    object.__setattr__(item, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            object.__delattr__(item, name)
        else:
            object.__setattr__(item, name, own)


# frameworks -------------------------------------------------------------------------------------


@contextmanager
def patched_windows(replacement: Callable[..., Any]) -> Iterator[None]:
    """A context in which Keras calls TensorFlow's convolutions and pooling through ``replacement(own, inputs, …)``."""
    from keras.src.backend.tensorflow import nn

    names = ("average_pool", "conv", "conv_transpose", "depthwise_conv", "max_pool", "separable_conv")
    kept = {name: getattr(nn, name) for name in names}
    for name, own in kept.items():
        setattr(nn, name, functools.partial(replacement, own))
    try:
        yield
    finally:
        for name, own in kept.items():
            setattr(nn, name, own)


def strategy_aware_classes() -> list[type]:
    """The classes whose ``__init__`` keeps TensorFlow's current strategy, if any; they have no public name."""
    if keras.backend.backend() != "tensorflow":
        return []
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    return [TFOptimizer, TensorFlowTrainer]


def torch_device() -> str:
    """The device on which Keras creates torch tensors."""
    from keras.src.backend.torch.core import get_device

    device: str = get_device()
    return device


def jax_state(model: Any) -> Any:
    """The values that the training step on JAX takes (``JAX_STATE``); the model lacks them while ``fit`` runs."""
    return model._get_jax_state(**dict.fromkeys(JAX_STATE, True))


def put_jax_state(model: Any, state: Sequence[Any]) -> None:
    """Assigns ``state`` to the model's variables, as Keras does when a callback reads them."""
    model._jax_state = dict(zip(JAX_STATE, state, strict=True))
    model._jax_state_synced = False
    model.jax_state_sync()


def unsynced_jax_state(model: Any) -> dict[str, Any] | None:
    """The values that the next ``jax_state_sync`` assigns to the model's variables; ``None`` if there are none."""
    state: dict[str, Any] | None = getattr(model, "_jax_state", None)
    return state if state and not model._jax_state_synced else None
