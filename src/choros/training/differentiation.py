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
    with _BY_BACKEND[keras.backend.backend()](factor_of):
        yield


@contextmanager
def _tensorflow(factor_of: Callable[[Any], Any]) -> Iterator[None]:
    import tensorflow as tf

    own = tf.GradientTape.gradient

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator, unused-ignore]
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


@contextmanager
def _torch(factor_of: Callable[[Any], Any]) -> Iterator[None]:
    import torch

    def scaled(tensors: Any, given: Any) -> Any:
        targets = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        factors = list(map(factor_of, targets))
        if all(factor is None for factor in factors):
            return given
        upstream = [None] * len(targets) if given is None else [given] if isinstance(given, torch.Tensor) else given
        return [
            each if factor is None else (torch.ones_like(of) if each is None else each) * factor.to(of.dtype)
            for of, each, factor in zip(targets, upstream, factors, strict=True)
        ]

    own_backward, own_grad = torch.autograd.backward, torch.autograd.grad

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        own_backward(tensors, scaled(tensors, grad_tensors), *args, **kwargs)

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        wanted = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        if any(isinstance(each, torch.nn.Parameter) for each in wanted):
            grad_outputs = scaled(outputs, grad_outputs)
        return own_grad(outputs, inputs, grad_outputs, *args, **kwargs)

    torch.autograd.backward, torch.autograd.grad = backward, grad
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = own_backward, own_grad


@contextmanager
def _jax(factor_of: Callable[[Any], Any]) -> Iterator[None]:
    import jax

    from choros.training.jax_forms import LossProgram

    own_value_and_grad, own_grad = jax.value_and_grad, jax.grad

    def value_and_grad(function: Any, argnums: Any = 0, *args: Any, **kwargs: Any) -> Any:
        differentiated = own_value_and_grad(function, argnums, *args, **kwargs)
        return lambda *given, **named: _scaled_after(1, differentiated, function, argnums, given, named)

    def grad(function: Any, argnums: Any = 0, has_aux: bool = False, *args: Any, **kwargs: Any) -> Any:
        differentiated = own_grad(function, argnums, has_aux, *args, **kwargs)
        return lambda *given, **named: _scaled_after(
            0 if has_aux else None, differentiated, function, argnums, given, named
        )

    def _scaled_after(
        index: int | None, differentiated: Any, function: Any, argnums: Any, given: Any, named: Any
    ) -> Any:
        result = differentiated(*given, **named)
        weights = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        factor = factor_of(LossProgram(function, given, named, weights))
        if factor is None:
            return result
        gradients = result if index is None else result[index]
        scaled = jax.tree.map(lambda each: each * factor.astype(each.dtype), gradients)
        return scaled if index is None else (*result[:index], scaled, *result[index + 1 :])

    jax.value_and_grad, jax.grad = value_and_grad, grad
    try:
        yield
    finally:
        jax.value_and_grad, jax.grad = own_value_and_grad, own_grad


_BY_BACKEND = {"tensorflow": _tensorflow, "torch": _torch, "jax": _jax}


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign")
