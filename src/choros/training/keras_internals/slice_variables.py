"""Slice variables: what Keras' optimizers update in place of a variable of which this rank has some items only.

They have the variable's name. They have its items during an update only: on PyTorch in the variable's memory, on JAX in
a function's, on TensorFlow in a copy.
"""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
from keras.src.utils.tracking import DotNotTrackScope, Tracker

from choros.training.keras_internals.models import AnyVariable, BaseOptimizer, in_stateless_scope
from choros.training.replaced import underived


def create(variable: Any, shape: tuple[int, ...]) -> Any:
    """Returns a slice variable of ``variable``, without memory."""
    empty = (0, *shape[1:])
    created = keras.Variable(keras.ops.zeros(empty, variable.dtype), trainable=False, name=variable.name)
    created._path, created._shape, created._ndim = variable.path, tuple(shape), len(shape)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.init_scope():
            any_rows = tf.TensorShape((None, *shape[1:]))
            created._value = tf.Variable(tf.zeros(empty, variable.dtype), trainable=False, shape=any_rows)
    return created


def load(created: Any, variable: Any, start: int) -> None:
    """Gives a slice variable the items of ``variable`` from ``start`` on."""
    shape = created._shape
    items = slice(start, start + math.prod(shape))
    if keras.backend.backend() == "torch":
        import torch

        part = variable.value.detach().reshape(-1)[items].view(shape)
        created._value = torch.nn.Parameter(part, requires_grad=False)
    else:
        created.assign(keras.ops.reshape(keras.ops.reshape(variable.value, (-1,))[items], shape))


def release(created: Any) -> None:
    """Releases the memory of a slice variable."""
    if keras.backend.backend() == "tensorflow":
        created._value.assign(keras.ops.zeros((0, *created._shape[1:]), created.dtype))
    elif not in_stateless_scope():
        created._value = keras.ops.zeros((0, *created._shape[1:]), created.dtype)


def decays_as(optimizer: Any, created: Any, variable: Any) -> None:
    """Makes weight decay apply to a slice variable if it does to ``variable``, which a user may have excluded."""
    decays = BaseOptimizer._use_weight_decay(optimizer, variable)
    optimizer._exclude_from_weight_decay_cache[optimizer._var_key(created)] = decays


class Outline(NamedTuple):
    """What a variable of an optimizer will be."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def assign(self, value: Any) -> None:
        """Nothing: it has no value."""


def outline(optimizer: Any, first: Sequence[Any], variables: Sequence[Any]) -> list[Outline]:
    """Returns what the variables of ``optimizer`` would be if it were built for ``variables``, in order; the ``first``
    are those that it has before.
    """
    kind = underived(type(optimizer))
    copy: Any = object.__new__(type(kind.__name__, (_Outlined, kind), {}))
    for name, value in {**vars(optimizer), **_unbuilt(first), "_self_setattr_tracking": False}.items():
        object.__setattr__(copy, name, value)
    copy.build(list(variables))
    return [each if isinstance(each, Outline) else outline_of(each) for each in copy._variables]


def building(*, inside: bool) -> AbstractContextManager[Any]:
    """The context in which Keras builds an optimizer; of one ``inside`` another, it tracks no lists."""
    return DotNotTrackScope() if inside else nullcontext()


def first_of(optimizer: Any) -> list[Any]:
    """Returns the variables that a built optimizer had before."""
    own = (optimizer._iterations, optimizer._learning_rate)
    return [each for each in own if any(each is variable for variable in optimizer._variables)]


def unbuild(optimizer: Any, first: Sequence[Any]) -> None:
    """Makes an optimizer one that is not built yet, with its ``first`` variables only."""
    for name, value in _unbuilt(first).items():
        object.__setattr__(optimizer, name, value)


def _unbuilt(first: Sequence[Any]) -> dict[str, Any]:
    """The attributes that ``build`` changes, as they are before."""
    variables = list(first)
    return {
        "_tracker": Tracker({"variables": (lambda value: isinstance(value, AnyVariable), variables)}),
        "_variables": variables,
        "_trainable_variables": [],
        "_trainable_variables_indices": {},
        "built": False,
    }


def outline_of(variable: Any) -> Outline:
    """Returns what a variable is."""
    # Keras numbers variables that were given no name.
    name = re.sub(r"^variable_\d+$", "variable", variable.name)
    return Outline(name, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))


class _Outlined:
    """An optimizer's class that creates outlines in place of variables."""

    def add_variable(self, shape: Any, initializer: Any = "zeros", dtype: Any = None, **options: Any) -> Outline:
        del initializer
        created = Outline(str(options.get("name")), tuple(shape), keras.backend.standardize_dtype(dtype))
        self._variables.append(created)  # type: ignore[attr-defined]
        return created

    add_variable_from_reference = BaseOptimizer.add_variable_from_reference

    def assign(self, variable: Any, value: Any) -> None:
        """Nothing: outlines have no values."""

    def _var_key(self, variable: Any) -> int:
        return id(variable)


def exchange_averages_in(context: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Lets ``SwapEMAWeights`` exchange the variables of an optimizer and their averages in a ``context`` of it."""

    def within(own: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def exchange(callback: Any, optimizer: Any) -> None:
            with context(optimizer):
                own(callback, optimizer)

        return exchange

    callback = keras.callbacks.SwapEMAWeights
    for name in ("swap_variables", "finalize_ema_values"):
        for framework in ("tf", "backend"):
            setattr(callback, f"_{framework}_{name}", within(getattr(callback, f"_{framework}_{name}")))
