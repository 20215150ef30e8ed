"""Synchronised batch normalisation: ``BatchNormalization(synchronized=True)`` normalises by the moments of all ranks.

Keras asks TensorFlow's replica context for them, which knows one replica in ``fit``, and refuses the argument on the
other frameworks. Here a layer asks where it is called::

    in a step of fit, train_on_batch             the ranks that train together; their losses weigh by examples
      a step of the global batch (xla engine)    Keras' own moments are those of all ranks already
    elsewhere                                    as the strategy or the layer says: in strategy.run, the replicas
    while Keras computes shapes                  Keras' own
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from choros.parallel.moments import RankMoments
from choros.training.keras_internals import in_symbolic_scope, normalize_by
from choros.training.own_losses import mark_known
from choros.training.weighting import step_of_this_thread

__all__ = ["is_synchronized", "synchronize", "synchronizing"]

#: From a count, a mean and a sum of squared deviations to the mean and the variance of all.
Combine = Callable[[Any, Any, Any], tuple[Any, Any]]

_ATTRIBUTE = "_choros_synchronized"


def synchronize(layer: Any, elsewhere: Callable[[], Combine | None] = lambda: None) -> None:
    """Makes a ``keras.layers.BatchNormalization`` normalise by the moments of all ranks, in training; once.

    Args:
        layer: the layer, which is changed in place.
        elsewhere: returns how moments are combined outside of the training steps of models; ``None``: they are not.
    """
    if hasattr(layer, _ATTRIBUTE):
        return

    def moments(inputs: Any, mask: Any, axes: Sequence[int], own: Callable[[], Any]) -> tuple[Any, Any]:
        combine = None if in_symbolic_scope() else _combine_here(elsewhere)
        mean, variance = own() if combine is None else map(mark_known, combine(*_own_moments(inputs, mask, axes)))
        return mean, variance

    # Bypasses Keras' attribute tracking: neither is part of the layer's state.
    object.__setattr__(layer, _ATTRIBUTE, True)
    normalize_by(layer, moments)


@contextmanager
def synchronizing() -> Iterator[None]:
    """A block in which each layer that asks for it is synchronised when it is called.

    A layer may create others in its first call.
    """
    kind = keras.layers.BatchNormalization
    own = kind.call

    @functools.wraps(own)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_synchronized(layer):
            synchronize(layer)
        return own(layer, *args, **kwargs)

    kind.call = call
    try:
        yield
    finally:
        kind.call = own


def is_synchronized(layer: Any) -> bool:
    """Whether the layer is a ``BatchNormalization`` that normalises by the moments of all ranks."""
    return isinstance(layer, keras.layers.BatchNormalization) and bool(layer.synchronized)


def _combine_here(elsewhere: Callable[[], Combine | None]) -> Combine | None:
    step = step_of_this_thread()
    if step is None:
        return elsewhere()
    if step.of_all_ranks:
        return None
    moments = RankMoments(step.process_set, step.weight, step.exchanges)

    def combine(count: Any, mean: Any, squares: Any) -> tuple[Any, Any]:
        present = keras.ops.cast(keras.ops.minimum(step.examples, 1), mean.dtype)
        return moments.combine(count * present, mean, squares * present)

    return combine


def _own_moments(inputs: Any, mask: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    """The number of rows, their mean and the sum of their squared deviations, which are zeros without any rows."""
    ops = keras.ops
    shape = ops.shape(inputs)
    if mask is None:
        count = functools.reduce(operator.mul, [ops.cast(shape[axis], inputs.dtype) for axis in axes])
        weights = None
    else:
        weights = ops.cast(ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), -1), shape), "bool")
        count = ops.reshape(ops.sum(ops.cast(weights, inputs.dtype), axes), [-1])
        inputs = ops.where(weights, inputs, 0)
    total = ops.sum(inputs, axes, keepdims=True)
    divisor = ops.maximum(count, 1)
    mean = total / (divisor if mask is None else ops.reshape(divisor, ops.shape(total)))
    deviations = inputs - mean
    if weights is not None:
        deviations = ops.where(weights, deviations, 0)
    return count, ops.reshape(mean, [-1]), ops.sum(ops.square(deviations), axes)
