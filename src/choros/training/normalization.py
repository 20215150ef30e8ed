"""Synchronised batch normalisation: ``BatchNormalization(synchronized=True)`` normalises by the moments of all ranks.

Keras asks TensorFlow's replica context for them, which knows one replica in ``fit``, and refuses the argument on the
other frameworks. Here a layer asks where it is called::

    in a step of fit, train_on_batch             the ranks that train together; their losses weigh by examples
      a step of the global batch (xla engine)    Keras' own moments are those of all ranks already
    elsewhere                                    as the strategy or the layer says: in strategy.run, the replicas
    while Keras computes shapes                  Keras' own
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras

from choros.comm import global_process_set, has_others, is_initialized
from choros.errors import ConfigError
from choros.parallel.moments import RankMoments
from choros.training.keras_internals.models import in_symbolic_scope, normalize_by
from choros.training.weighting import mark_known, step_of_this_thread

#: From a count, a mean and a sum of squared deviations to the mean and the variance of all.
Combine = Callable[[Any, Any, Any], tuple[Any, Any]]


def synchronize(layer: Any, elsewhere: Callable[[], Combine | None] = lambda: None) -> None:
    """Makes a layer, once, in place, normalise by all ranks' moments in training; ``elsewhere``: outside of steps."""

    def moments(inputs: Any, mask: Any, axes: Sequence[int], own: Callable[[], Any]) -> tuple[Any, Any]:
        combine = None if in_symbolic_scope() else _combine_here(elsewhere)
        mean, variance = own() if combine is None else map(mark_known, combine(*_own_moments(inputs, mask, axes)))
        return mean, variance

    normalize_by(layer, moments)


_call = keras.layers.BatchNormalization.call


@functools.wraps(_call)
def synchronizing_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """``BatchNormalization.call`` in steps: a layer that asks for it is synchronised, also one created in a step."""
    if is_synchronized(layer):
        synchronize(layer)
    return _call(layer, *args, **kwargs)


def is_synchronized(layer: Any) -> bool:
    """Whether the layer is a ``BatchNormalization`` that normalises by the moments of all ranks."""
    return isinstance(layer, keras.layers.BatchNormalization) and bool(layer.synchronized)


@keras.saving.register_keras_serializable(package="choros")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A ``keras.layers.BatchNormalization`` that normalises by the mean and the variance of all ranks' rows.

    In training, on all frameworks: in ``fit``, and in loops of your own, in which all ranks must call it. Ranks may
    have different numbers of rows. Each call sends one small message forward and one backward.

    Args:
        fused: Horovod's; only ``False``.
        **kwargs: those of ``keras.layers.BatchNormalization``.

    Raises:
        ConfigError: ``fused`` is not ``False``.

    Example:
        >>> import keras, choros.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((4,)), hvd.SyncBatchNormalization(momentum=0.9)])
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ConfigError(f"SyncBatchNormalization(fused={fused}): only False is possible, as in Horovod.")
        # Keras accepts the argument only on TensorFlow.
        super().__init__(**{**kwargs, "synchronized": False})
        self.synchronized = True
        synchronize(self, _of_the_job)


def _of_the_job() -> Any:
    """What combines the moments of all ranks, whose gradients have the same weight."""
    several = is_initialized() and has_others(global_process_set)  # a traced step asks once
    return RankMoments().combine if several else None


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
