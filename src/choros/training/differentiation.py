"""Where a training step computes the gradients of its losses: each may be scaled there.

A ``train_step`` of one's own may differentiate any number, also one that no loss of Keras has computed::

    tape.gradient(loss, weights)       TensorFlow: of a vector, the gradient of its sum
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

__all__ = ["scaled_gradients"]


@contextmanager
def scaled_gradients(factor_of: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which gradients of variables are multiplied by a factor of what they are gradients of.

    Args:
        factor_of: returns the factor of the gradients of a tensor, a scalar; ``None`` to leave them as they are.
    """
    if keras.backend.backend() != "tensorflow":
        yield
        return
    import tensorflow as tf

    own = tf.GradientTape.gradient

    def gradient(
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        targets, wanted = tf.nest.flatten(target), tf.nest.flatten(sources)
        if not any(map(_is_variable, wanted)):  # such as a penalty on the gradient of the inputs
            return own(tape, target, sources, output_gradients, unconnected_gradients)
        factors = list(map(factor_of, targets))
        if all(factor is None for factor in factors):
            return own(tape, target, sources, output_gradients, unconnected_gradients)
        given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
        upstream = [
            each if factor is None else (tf.ones_like(of) if each is None else each) * tf.cast(factor, of.dtype)
            for of, each, factor in zip(targets, given, factors, strict=True)
        ]
        return own(tape, targets, sources, upstream, unconnected_gradients)

    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = own


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign")
