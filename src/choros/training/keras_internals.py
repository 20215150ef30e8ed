"""All of choros that depends on how Keras is made inside: ``keras.src`` and private attributes, of Keras 3.15.

Each function says what it reaches for, and why no public name does. A new version of Keras that moves one of these is
met here and nowhere else (``tests/test_keras_internals.py`` sees to that).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras.src import api_export
from keras.src.backend.common.variables import Variable as AnyVariable
from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.trainer import Trainer
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.tracking import no_automatic_dependency_tracking

__all__ = [
    "JAX_STATE",
    "AnyVariable",
    "BaseOptimizer",
    "Trainer",
    "accumulators",
    "apply_count",
    "build_before_training",
    "build_from_batch",
    "decays",
    "drop_empty_gradients",
    "exclude_from_weight_decay",
    "export_like",
    "flatten_metrics",
    "has_value",
    "initial_epoch",
    "inner_optimizers",
    "innermost",
    "jax_state",
    "layers_of",
    "learning_rate_of",
    "load_optimizer_weights_from_hdf5_group",
    "no_automatic_dependency_tracking",
    "note_trained_variables",
    "own_statistics",
    "own_variables",
    "put_jax_state",
    "pythonify_logs",
    "set_initial_epoch",
    "torch_device",
    "train_validation_split",
    "trained_variables",
    "unsynced_jax_state",
]

# From keras.src as they are:
#   AnyVariable, BaseOptimizer, Trainer   the classes behind all variables, optimizers and models: keras.Variable is the
#                                         framework's subclass, and Trainer has no public name.
#   load_optimizer_weights_from_hdf5_group, train_validation_split, pythonify_logs
#                                         what load_model and fit do with .h5 files, validation_split and logs.
#   no_automatic_dependency_tracking      for methods that set lists on an optimizer, as Keras' own ``build`` has it.

#: What Keras' training step on JAX takes and gives, in this order.
JAX_STATE = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


# optimizers -------------------------------------------------------------------------------------


def innermost(optimizer: Any) -> Any:
    """The optimizer within a ``LossScaleOptimizer``, or the one given; public, but for others than that class."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Those within a ``LossScaleOptimizer`` or a ``MultiOptimizer``, which keeps its own in a private list."""
    scaled = getattr(optimizer, "inner_optimizer", None)
    return [*([] if scaled is None else [scaled]), *getattr(optimizer, "_inner_optimizers", ())]


def trained_variables(optimizer: Any) -> list[Any]:
    """The variables that a built optimizer trains, in its order; ``optimizer.variables`` are its own."""
    variables: list[Any] = optimizer._trainable_variables
    return variables


def note_trained_variables(optimizer: Any, variables: Iterable[Any]) -> None:
    """``build`` without any state: what ``BaseOptimizer.build`` sets apart from the variables it makes."""
    optimizer._trainable_variables = list(variables)
    for index, variable in enumerate(optimizer._trainable_variables):
        optimizer._trainable_variables_indices[optimizer._var_key(variable)] = index
    optimizer.built = True


def apply_count(optimizer: Any) -> Any:
    """The variable that counts ``apply``; the public ``iterations`` counts updates, which may be fewer."""
    return innermost(optimizer)._iterations


def learning_rate_of(optimizer: Any) -> Any:
    """The variable, schedule or function of the learning rate; the public ``learning_rate`` is its value."""
    return optimizer._learning_rate


def accumulators(optimizer: Any) -> Sequence[Any]:
    """The variables that sum up gradients with ``gradient_accumulation_steps``; they have no public name."""
    accumulated: Sequence[Any] = getattr(optimizer, "_accumulated_gradients", ())
    return accumulated


def own_variables(optimizer: Any) -> list[Any]:
    """A ``LossScaleOptimizer``'s own; its public ``variables`` include the inner optimizer's."""
    variables: list[Any] = optimizer._variables
    return variables


def drop_empty_gradients(optimizer: Any, gradients: Any, variables: Any) -> Any:
    """Gradients that are not ``None`` and their variables, with Keras' warnings and errors for the others."""
    return optimizer._filter_empty_gradients(gradients, variables)


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether weight decay applies to ``variable``; Keras has only the setter public."""
    return bool(optimizer._use_weight_decay(variable))


def exclude_from_weight_decay(optimizer: Any, variables: Iterable[Any]) -> None:
    """The setter, for variables alone: the public one also forgets the patterns of names."""
    optimizer._exclude_from_weight_decay = {optimizer._var_key(variable) for variable in variables}


def export_like(derived: type, base: type) -> None:
    """Has ``derived`` saved under the public name of ``base``, by which Keras finds a class when it loads a file."""
    if (public_name := api_export.REGISTERED_OBJS_TO_NAMES.get(base)) is not None:
        api_export.REGISTERED_OBJS_TO_NAMES[derived] = public_name


# models, layers, variables ----------------------------------------------------------------------


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """All layers, of all depths; the public ``layers`` are those of the first depth."""
    return list(model._flatten_layers(include_self=include_self))


def own_statistics(layer: Any) -> list[Any]:
    """What a layer itself counts, such as a moving mean; the public name includes seeds and the layers within."""
    statistics: list[Any] = layer._non_trainable_variables
    return statistics


def has_value(variable: Any) -> bool:
    """Whether the variable has its value yet; the public ``value`` would make one."""
    return variable._value is not None


def flatten_metrics(model: Any, results: dict[str, Any]) -> Any:
    """``results`` as ``evaluate`` gives them without ``return_dict``."""
    return model._flatten_metrics_in_order(results)


def initial_epoch(model: Any) -> int:
    """The epoch at which the ``fit`` that is beginning will begin, as ``BackupAndRestore`` sets it."""
    epoch: int = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Has the ``fit`` that is beginning begin at ``epoch``."""
    model._initial_epoch = epoch


def build_from_batch(model: Any, batch: Any = None, iterator: Any = None) -> None:
    """Makes what a model of this batch has yet to make (variables, metrics), as ``fit`` does before it trains."""
    model._symbolic_build(iterator=iterator, data_batch=batch)


def build_before_training(model: Any) -> None:
    """Has ``fit`` build a model of unknown input from its first batch before it trains, as on other frameworks.

    On TensorFlow, Keras would do so in the first step, when replicas should have equal weights already.
    """

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if not model.built:
            build_from_batch(model, data_batch, iterator)

    # Past Keras' attribute tracking: this is no part of the model.
    object.__setattr__(model, "_maybe_symbolic_build", build)


# frameworks -------------------------------------------------------------------------------------


def torch_device() -> str:
    """The device on which Keras makes torch tensors."""
    from keras.src.backend.torch.core import get_device

    device: str = get_device()
    return device


def jax_state(model: Any) -> Any:
    """The values that the training step on JAX takes (``JAX_STATE``); while ``fit`` runs the model has none."""
    return model._get_jax_state(**dict.fromkeys(JAX_STATE, True))


def put_jax_state(model: Any, state: Sequence[Any]) -> None:
    """Gives the model's variables the values of ``state``, as Keras does when a callback asks for them."""
    model._jax_state = dict(zip(JAX_STATE, state, strict=True))
    model._jax_state_synced = False
    model.jax_state_sync()


def unsynced_jax_state(model: Any) -> dict[str, Any] | None:
    """The values that the model's variables will get at the next ``jax_state_sync``, if any wait."""
    state: dict[str, Any] | None = getattr(model, "_jax_state", None)
    return state if state and not model._jax_state_synced else None
