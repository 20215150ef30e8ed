"""Recipes: what a worker needs to create its own copy of an object of the scope.

::

    chief                                                        worker
    Keras' layer       its configuration and state       ────►   from_config, load_own_variables, load_assets
    functional model   its configuration; the user's     ────►   from_config, with these layers
                       layers, and those of other models
    the user's class   its attributes                    ────►   Layer.__init__ or Model.__init__, and the attributes
    compile            its arguments, what is trainable  ────►   compile
    optimizer, metric  class, configuration              ────►   from_config

The values of large weights are left out: workers pull them from the servers.
"""

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from choros.comm import Array
from choros.parallel.structure import leaves
from choros.parameter_server.scope_objects import host, layers_in_order
from choros.training.keras_internals.models import (
    is_functional,
    layers_of,
    learning_rate_of,
    order_tracked,
    tracked,
    user_attributes,
)
from choros.training.keras_internals.saving import deserialize_sharing, serialize_sharing
from choros.training.replaced import underived

#: A function and its arguments, as ``pickle`` takes them: together they create a copy.
Recipe = tuple[Callable[..., Any], tuple[Any, ...]]

#: Larger weights of layers are sent as zeros.
_SMALL = 1 << 16
#: Classes and functions of these packages are not the user's.
_KNOWN = frozenset(("keras", "builtins", "choros", "numpy", "tensorflow", "torch", "jax"))
#: Attributes of ``keras.Layer`` that classes set.
_SETTINGS = ("supports_masking", "input_spec", "autocast")


def by_recipe(item: Any, shared: Callable[[Any], bool]) -> Recipe | None:
    """Returns how to create a copy of a Keras object, ``None`` for others; ``shared`` layers go by reference."""
    if isinstance(item, keras.Variable):
        config = {name: getattr(item, name) for name in ("trainable", "name", "aggregation")}
        return partial(keras.Variable, shape=tuple(item.shape), dtype=str(item.dtype), **config), ("zeros",)
    if isinstance(item, keras.optimizers.LossScaleOptimizer):
        config = {name: value for name, value in item.get_config().items() if name != "inner_optimizer"}
        return partial(item.__class__, **config), (item.inner_optimizer,)
    if isinstance(item, keras.optimizers.Optimizer):
        kind: Any = underived(type(item))
        return kind.from_config, (optimizer_config(item),)
    if isinstance(item, keras.Metric):
        return type(item).from_config, (item.get_config(),)
    if isinstance(item, keras.losses.Loss) and type(item).__module__.startswith("keras."):
        # Plain pickling includes a timestamp: workers would treat each copy as a new function and retrace it.
        return keras.saving.deserialize_keras_object, (keras.saving.serialize_keras_object(item),)
    if isinstance(item, keras.Layer):
        if is_functional(item):
            return _functional_recipe(item, shared)
        return _attributes_recipe(item) if _is_users(item) else _layer_recipe(item, {})
    return None


def optimizer_config(optimizer: Any) -> dict[str, Any]:
    """Returns the configuration of an optimizer; a schedule of the learning rate is in it as an object."""
    config = dict(optimizer.get_config())
    config["learning_rate"] = learning_rate_of(optimizer) if follows_schedule(optimizer) else current_rate(optimizer)
    return config


def follows_schedule(optimizer: Any) -> bool:
    """Returns whether the optimizer follows a schedule of the learning rate, as the servers' then does too."""
    return isinstance(learning_rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule)


def current_rate(optimizer: Any) -> float:
    """Returns the current learning rate."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def compile_copy(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], trainable: Sequence[bool]) -> None:
    """Compiles ``model`` with the arguments of the chief's call, after setting which of its layers are trainable."""
    for layer, is_trainable in zip(layers_in_order(model), trainable, strict=True):
        if layer.trainable != is_trainable:
            layer.trainable = is_trainable
    model.compile(*args, **kwargs)


# Keras' layers, with what they keep besides weights: vocabularies, statistics.


#: What ``save_own_variables`` and ``save_assets`` of a layer write; of a large array, the function that returns zeros.
_LayerState = tuple[Mapping[str, Array | Callable[[], Array]], Mapping[str, bytes]]


def _state_of(layer: Any) -> _LayerState | None:
    if not layer.built:
        return None
    variables: dict[str, Any] = {}
    layer.save_own_variables(variables)
    assets = {}
    if hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory() as name:
            layer.save_assets(name)
            assets = {path.name: path.read_bytes() for path in Path(name).iterdir()}
    pulled = set(map(id, layer.weights))  # not what layers compute of them, or keep besides: that goes as it is
    return {name: _zeros(value) if id(value) in pulled else host(value) for name, value in variables.items()}, assets


def _load(layer: Any, state: _LayerState) -> None:
    variables, assets = state
    if variables:
        layer.load_own_variables({key: value() if callable(value) else value for key, value in variables.items()})
    if assets:
        with tempfile.TemporaryDirectory() as name:
            for file, data in assets.items():
                (Path(name) / file).write_bytes(data)
            layer.load_assets(name)


def _zeros(weight: Any) -> Array | Callable[[], Array]:
    array = host(weight)
    return array if array.nbytes <= _SMALL else partial(np.zeros, array.shape, str(array.dtype))


def _layer_recipe(layer: Any, given: Mapping[int, Any], copied: AbstractSet[int] = frozenset()) -> Recipe:
    """Returns that of a layer or a model, of which layers are ``given``; ``copied``: the ids of all in these."""
    config, inner = serialize_sharing(layer, given), layers_in_order(layer)
    customs = _custom_objects(config, [each for each in inner if id(each) not in copied])
    states = tuple(None if id(each) in copied else _state_of(each) for each in inner)
    return _layer, (config, customs, given, states)


def _layer(
    config: Any, custom_objects: Mapping[str, Any], given: Mapping[int, Any], states: Sequence[_LayerState | None]
) -> Any:
    layer = deserialize_sharing(config, given, custom_objects)
    copied = {id(part) for each in given.values() for part in layers_of(each)}
    for each, state in zip(layers_in_order(layer), states, strict=True):
        if state is not None and id(each) not in copied:
            _load(each, state)
    return layer


# Functional and sequential models.


def _functional_recipe(model: Any, shared: Callable[[Any], bool]) -> Recipe:
    given = {
        id(layer): layer
        for layer in layers_of(model, include_self=False)
        if not isinstance(layer, keras.layers.InputLayer) and (shared(layer) or _is_users(layer))
    }
    copied = {id(part) for layer in given.values() for part in layers_of(layer, include_self=False)}
    given = {key: layer for key, layer in given.items() if key not in copied}
    return _layer_recipe(model, given, copied | given.keys())


# The user's own classes.


def _attributes_recipe(layer: Any) -> Recipe:
    attributes = {name: _plain(value) for name, value in user_attributes(layer).items()}
    settings = {name: getattr(layer, name) for name in _SETTINGS}
    init = {"name": layer.name, "dtype": layer.dtype_policy, "trainable": layer.trainable}
    base = keras.Model if isinstance(layer, keras.Model) else keras.Layer
    return _user_layer, (type(layer), base, init, {**settings, **attributes}, tracked(layer), layer.built)


def _user_layer(
    kind: Any, base: Any, init: Mapping[str, Any], attributes: Mapping[str, Any], order: Any, built: bool
) -> Any:
    layer = kind.__new__(kind)
    base.__init__(layer, **init)
    for name, value in attributes.items():
        setattr(layer, name, value)
    order_tracked(layer, order)
    layer.built = built
    return layer


def _plain(value: Any) -> Any:
    """Returns the lists and dictionaries in an attribute as they were before Keras or TensorFlow has wrapped them."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    return value


def _is_users(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] != "keras" and not is_functional(layer)


def _custom_objects(config: Any, layers: Sequence[Any]) -> dict[str, Any]:
    """Returns the user's classes and functions that the layers' configuration names."""
    names = {each for each in leaves(config) if isinstance(each, str)}
    found = {}
    for layer in layers:
        for part in (layer, *vars(layer).values()):
            kind = part if inspect.isfunction(part) else type(part)
            if kind.__module__.partition(".")[0] not in _KNOWN:
                name = keras.saving.get_registered_name(kind)
                if name in names and name != "<lambda>":
                    found[name] = kind
    return found
