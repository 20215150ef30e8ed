"""Models, layers, metrics, variables and optimizers of Keras: what they have, and do, under private names."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
from keras.src import api_export
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope, Variable
from keras.src.models.functional import Functional, functional_like_constructor
from keras.src.optimizers.base_optimizer import BaseOptimizer as BaseOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer as MultiOptimizer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.random.seed_generator import global_seed_generator as make_global_seed_generator
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.trainer import Trainer as Trainer

from choros.training.replaced import derived, replaced

# Imported unchanged for other modules, besides base classes that have no public name:
#   in_stateless_scope  whether variables have the values of a function's arguments.
#   in_symbolic_scope   whether Keras only computes shapes.

#: The base class of variables: ``keras.Variable`` is the framework's subclass.
AnyVariable = Variable

_TRACKED = ("_layers", "_trainable_variables", "_non_trainable_variables")
#: Attributes that Keras sets in ``fit``, ``evaluate`` and ``predict``, and methods that the chief of parameter servers
#: replaces in ``fit``.
_LATE_ATTRIBUTES = frozenset(
    (
        "_eval_epoch_iterator",
        "_jax_state",
        "get_metrics_result",
        "history",
        "jax_state_sync",
        "make_predict_function",
        "make_test_function",
        "make_train_function",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
    )
)
#: The mark of models that ``fit`` has built from a batch.
BUILT = "_choros_built"

#: The methods of an optimizer that a user's class may override, so that it needs whole variables; or all of them.
NEED_VARIABLES = frozenset(
    (
        "build",
        "update_step",
        "_backend_update_step",
        "_parallel_update_step",
        "_use_weight_decay",
        "_apply_weight_decay",
    )
)
NEED_ALL = frozenset(("apply", "stateless_apply", "_backend_apply_gradients", "_clip_gradients"))


# optimizers -------------------------------------------------------------------------------------


def innermost(optimizer: Any) -> Any:
    """The optimizer inside a ``LossScaleOptimizer``, or the given one; the public name exists on that class only."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers inside a ``LossScaleOptimizer`` or a ``MultiOptimizer``, which has them in a private list."""
    scaled = getattr(optimizer, "inner_optimizer", None)
    return [*([] if scaled is None else [scaled]), *getattr(optimizer, "_inner_optimizers", ())]


def loss_scale_in_creation() -> Any:
    """The ``LossScaleOptimizer`` whose ``__init__`` sets ``loss_scale_factor`` of the one that it puts itself around,
    last, if the caller is that one's ``__setattr__``; else ``None``.
    """
    setting = sys._getframe(2).f_locals.get("self")
    return setting if isinstance(setting, keras.optimizers.LossScaleOptimizer) else None


def trained_variables(optimizer: Any) -> list[Any]:
    """The variables that a built optimizer trains, in its order; ``optimizer.variables`` are its own state."""
    variables: list[Any] = optimizer._trainable_variables
    return variables


def note_trained_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """``build`` without any state: sets what ``BaseOptimizer.build`` sets besides the variables it creates."""
    indices = {optimizer._var_key(variable): index for index, variable in enumerate(variables)}
    # Bypasses Keras' attribute tracking: the variables are the model's.
    object.__setattr__(optimizer, "_trainable_variables", list(variables))
    object.__setattr__(optimizer, "_trainable_variables_indices", indices)
    optimizer.built = True


def apply_count(optimizer: Any) -> Any:
    """The variable that counts calls of ``apply``; the public ``iterations`` counts updates, which may be fewer."""
    return innermost(optimizer)._iterations


def velocities_of(optimizer: Any) -> Sequence[Any]:
    """The velocities of an optimizer with momentum, none before it is built; RMSprop's have no public name."""
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or ()
    return [each for each in found if each is not None]


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


def drop_quietly(optimizer: Any) -> None:
    """Makes ``apply`` drop empty gradients without a warning, as where others have the rest of the variables."""

    def drop(gradients: Any, variables: Any) -> Any:
        kept = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        return [gradient for gradient, _ in kept], [variable for _, variable in kept]

    # Bypasses Keras' attribute tracking: the function is not part of the optimizer.
    object.__setattr__(optimizer, "_filter_empty_gradients", drop)


def check_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises Keras' error if a built optimizer does not train one of the ``variables``."""
    optimizer._check_variables_are_known(variables)


def count_step(optimizer: Any) -> None:
    """``apply`` without any gradient, which Keras refuses: counts the step, and moves the averages of the variables."""
    own: dict[str, Any] = {}
    if keras.backend.backend() == "torch":
        from keras.src.backend.torch.optimizers.torch_parallel_optimizer import TorchParallelOptimizer

        if isinstance(optimizer, TorchParallelOptimizer):  # whose update of all variables at once fails for none
            own["_backend_update_step"] = super(TorchParallelOptimizer, optimizer)._backend_update_step
    with replaced(optimizer, **own):
        optimizer._backend_apply_gradients([], [])
    apply_count(optimizer).assign_add(1)


def check_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Warns of variables that have no gradient, and raises an error if none has, as Keras does."""
    if variables:
        BaseOptimizer._filter_empty_gradients(optimizer, gradients, variables)


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether weight decay applies to ``variable``; in Keras only the setter is public."""
    return bool(optimizer._use_weight_decay(variable))


def exclude_from_weight_decay(optimizer: Any, variables: Iterable[Any]) -> None:
    """The setter, for variables alone: the public one also resets the name patterns."""
    optimizer._exclude_from_weight_decay = {optimizer._var_key(variable) for variable in variables}


def update_if_finite(optimizer: Any, finite: Any, state: Any, gradients: Any, values: Any) -> tuple[Any, Any]:
    """The new values and state of a ``LossScaleOptimizer`` whose gradients are, or are not, ``finite``: the rest of its
    public ``stateless_apply``, also outside of compiled functions.
    """

    def update() -> tuple[Any, Any]:
        updated, new_state = optimizer._stateless_handle_finite_grads(state, gradients, values)
        return list(updated), list(new_state)

    def skip() -> tuple[Any, Any]:
        updated, new_state = optimizer._stateless_handle_non_finite_grads(state, values)
        return list(updated), list(new_state)

    import jax

    if isinstance(finite, jax.core.Tracer):
        result: tuple[Any, Any] = keras.ops.cond(finite, update, skip)
        return result
    return update() if finite else skip()


def derive(base: type, behaviour: type) -> type:
    """``derived``, of a class that is saved as ``base``."""
    kind = derived(base, behaviour)
    # Under its public name Keras finds a class when it loads a file.
    if (public_name := api_export.REGISTERED_OBJS_TO_NAMES.get(base)) is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[kind] = public_name
    return kind


# models, layers, metrics, variables -------------------------------------------------------------


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """The layers at all depths; the public ``layers`` are those at the first depth."""
    return list(model._flatten_layers(include_self=include_self))


def metrics_of(model: Any) -> list[Any]:
    """All metrics, also those given to ``compile``, which the public ``metrics`` lacks until the first batch."""
    compiled = model._compile_metrics
    given = () if compiled is None else (compiled._user_metrics, compiled._user_weighted_metrics)
    return [each for each in (*model.metrics, *keras.tree.flatten(given)) if isinstance(each, keras.Metric)]


def single_metrics(metrics: Iterable[Any]) -> list[Any]:
    """Replaces the one metric that holds all those given to ``compile`` by them; it has no public name."""
    return [single for each in metrics for single in (each.metrics if isinstance(each, CompileMetrics) else [each])]


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that are attributes of a model or of its layers, also in lists and dicts; Keras knows one only."""
    found: dict[int, Any] = {}

    def collect(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            found[id(value)] = value
        elif isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                collect(item)

    for layer in layers_of(model):
        collect({name: value for name, value in vars(layer).items() if not name.startswith("_")})
    return list(found.values())


def built_optimizers(model: Any) -> list[Any]:
    """Those of ``optimizers_of`` that are built, as the model's own one is now."""
    own = getattr(model, "optimizer", None)
    if own is not None and not own.built and model.trainable_variables:  # which may be frozen for the moment
        own.build(model.trainable_variables)
    return [each for each in optimizers_of(model) if each.built]


def own_methods(model: Any) -> frozenset[str]:
    """Those of the methods that train which a model's class has overridden, Keras has no flag for it; ``call`` and
    ``__call__`` if a loss that it is compiled with has its own.
    """
    names = {name for name in ("train_step", "test_step", "compute_loss") if overrides(model, name)}
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        if isinstance(loss, keras.losses.Loss):
            functions = {"call": getattr(loss, "fn", type(loss).call), "__call__": type(loss).__call__}
        else:
            functions = {"call": loss} if callable(loss) else {}
        names |= {name for name, function in functions.items() if not _is_of_keras(function)}
    return frozenset(names)


def overrides(owner: Any, method: str) -> bool:
    """Whether the class of a model, or of a metric, has overridden a method of Keras'."""
    return not _is_of_keras(getattr(type(owner), method))


def _is_of_keras(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(f"{keras.__name__}.src.")


def own_statistics(layer: Any) -> list[Any]:
    """A layer's own statistics, such as a moving mean; the public name includes seeds and the inner layers."""
    statistics: list[Any] = layer._non_trainable_variables
    return statistics


def statistics_of(layer: Any) -> list[Any]:
    """A layer's own statistics of rows; those of ``SpectralNormalization`` are of its weights."""
    return [] if isinstance(layer, keras.layers.SpectralNormalization) else own_statistics(layer)


def normalize_by(layer: Any, moments: Callable[[Any, Any, Sequence[int], Callable[[], Any]], Any]) -> None:
    """Makes a layer normalise in training by ``moments(inputs, mask, axes of the rows, Keras' own)``, if none does."""
    if "_moments" in vars(layer):
        return
    given = layer._moments

    def normalizing(inputs: Any, mask: Any) -> Any:
        axes = layer._reduction_axes

        def own() -> Any:
            return keras.ops.moments(inputs, axes=axes) if mask is None else given(inputs, mask)

        return moments(inputs, mask, axes, own)

    # Bypasses Keras' attribute tracking: the function is not part of the layer.
    object.__setattr__(layer, "_moments", normalizing)


def has_value(variable: Any) -> bool:
    """Whether the variable has a value yet; reading the public ``value`` would create one."""
    return variable._value is not None


def local_value(variable: Any) -> Any:
    """This process's value; the public ``value`` may be overridden, to communicate."""
    return variable._value


def read_gathered_rows_only() -> None:
    """Makes ``tf.gather`` (``Embedding``) read rows of Keras' variables, which lack ``sparse_read``, not copy all."""

    def sparse_read(variable: Any, indices: Any, name: str | None = None) -> Any:
        import tensorflow as tf

        with AutocastScope(None):
            value = variable.value
        return variable._maybe_autocast(tf.gather(value, indices, name=name))

    if not hasattr(keras.Variable, "sparse_read"):
        keras.Variable.sparse_read = sparse_read


def seed_generators_of(model: Any) -> list[Any]:
    """The seed generators of a model's layers at all depths; they have no public name."""
    return [generator for layer in layers_of(model) for generator in getattr(layer, "_seed_generators", ())]


def global_seed_generator(*, create: bool = False) -> Any:
    """The generator of random functions that are given no seed; ``None`` if there is none yet, unless it is created."""
    return make_global_seed_generator() if create else get_global_attribute(GLOBAL_SEED_GENERATOR)


def is_built(model: Any) -> bool:
    """Whether all layers have variables: ``build(shape)`` without an own ``build`` marks the model, not its layers."""

    def waits(layer: Any) -> bool:
        is_container = type(layer).build is keras.Layer.build and type(layer).call is keras.Model.call
        return not (layer.built or is_container)

    is_early = hasattr(model, BUILT) or (model.built and keras.backend.backend() != "tensorflow")
    return is_early or not any(map(waits, layers_of(model)))


def build_from_batch(model: Any, batch: Any = None, iterator: Any = None) -> bool:
    """Creates the variables and metrics that a model lacks, for batches like this one; returns whether they exist.
    On TensorFlow its own ``train_step`` is traced, not run: only that knows whose input is what, and there may be no
    ``call``. An eager step cannot be traced: Keras calls the model, if that succeeds.
    """
    has_own_step = keras.backend.backend() == "tensorflow" and overrides(model, "train_step")
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


def build_metrics(model: Any, batch: Callable[[], Any]) -> None:
    """Creates the variables of the metrics given to ``compile``, which TensorFlow would create in the first step, if
    there is a ``batch`` to create them from.
    """
    metrics = model._compile_metrics
    if model.built and metrics is not None and not metrics.built and (example := batch()) is not None:
        build_from_batch(model, example)


def tracked(layer: Any) -> dict[str, list[Any]]:
    """The layers and variables that a layer has, in the order in which Keras has found them in its attributes."""
    return {name: list(getattr(layer, name)) for name in _TRACKED}


def order_tracked(layer: Any, order: Mapping[str, Sequence[Any]]) -> None:
    """Makes the order the same as in another process, where ``tracked`` was called."""
    for name, items in order.items():
        getattr(layer, name)[:] = items


def user_attributes(layer: Any) -> dict[str, Any]:
    """The attributes that a user's class has set, without those that Keras and the framework have set."""
    plain: Any = keras.Model() if isinstance(layer, keras.Model) else keras.Layer()
    if isinstance(layer, keras.Model):
        plain.compile()
    own = frozenset(vars(plain)) | _LATE_ATTRIBUTES
    # PyTorch keeps modules apart, and among them one of Keras' own.
    modules = {name: value for name, value in vars(layer).get("_modules", {}).items() if name != "torch_params"}
    attributes = {**vars(layer), **modules}
    return {name: value for name, value in attributes.items() if name not in own and not name.startswith("_self_")}


def is_functional(layer: Any) -> bool:
    """Whether a layer is a model that Keras describes by its graph: sequential, or functional without a constructor."""
    return isinstance(layer, keras.Sequential) or (
        isinstance(layer, Functional) and bool(functional_like_constructor(type(layer)))
    )


def statistics_of_any_rows() -> AbstractContextManager[None]:
    """A context in which ``BatchNormalization`` keeps its statistics in batches without rows, as that of Keras 2 does.
    Those that other functions normalise by (``normalize_by``) are not concerned.
    """
    own = keras.layers.BatchNormalization._moments

    def moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        rows, kept = keras.ops.shape(inputs)[0], (layer.moving_mean, layer.moving_variance)
        if isinstance(rows, int):
            return own(layer, inputs, mask) if rows else tuple(keras.ops.cast(each, inputs.dtype) for each in kept)
        pairs = zip(own(layer, inputs, mask), kept, strict=True)
        mean, variance = (keras.ops.where(rows > 0, new, keras.ops.cast(each, new.dtype)) for new, each in pairs)
        return mean, variance

    return replaced(keras.layers.BatchNormalization, _moments=moments)


@contextmanager
def patched_operations(add: Callable[..., Any], window: Callable[..., Any] | None) -> Iterator[None]:
    """A context in which Keras calls TensorFlow's ``add`` through ``add(own, x1, x2)``, and convolutions and pooling
    through ``window(own, inputs, …)``, if given.
    """
    from keras.src.backend.tensorflow import nn, numpy

    names = ("average_pool", "conv", "conv_transpose", "depthwise_conv", "max_pool", "separable_conv")
    windows = {name: functools.partial(window, getattr(nn, name)) for name in names} if window else {}
    with replaced(nn, **windows), replaced(numpy, add=functools.partial(add, numpy.add)):
        yield


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
