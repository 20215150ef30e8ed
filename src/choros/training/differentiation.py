"""Where a step computes gradients of its losses, each may be scaled: a ``train_step`` may differentiate any number.

::

    tape.gradient(loss, weights)       TensorFlow: of a vector, the gradient of its sum
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from choros.training.replaced import Replaced

#: The factor of a tensor's gradients; ``None`` for 1.
FactorOf = Callable[[Any], Any]


def scaled_gradients(factor_of: FactorOf) -> Replaced:
    """A context that multiplies variables' gradients of a tensor by ``factor_of(tensor)``, unless that is ``None``."""
    return {"tensorflow": _tensorflow, "torch": _torch, "jax": _jax}[keras.backend.backend()](factor_of)


def _scaled(factor_of: FactorOf, targets: Sequence[Any], given: Sequence[Any] | None) -> Sequence[Any] | None:
    """The gradients from which those of ``targets`` are computed, instead of ``given`` ones (``None``: ones)."""
    factors = list(map(factor_of, targets))
    if all(factor is None for factor in factors):
        return given
    return [
        each
        if factor is None
        else (keras.ops.ones_like(of) if each is None else each) * keras.ops.cast(factor, of.dtype)
        for of, each, factor in zip(targets, given or [None] * len(targets), factors, strict=True)
    ]


def _tensorflow(factor_of: FactorOf) -> Replaced:
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
        if any(hasattr(each, "assign") for each in tf.nest.flatten(sources)):  # not a penalty on the inputs' gradient
            target = tf.nest.flatten(target)
            given = None if output_gradients is None else tf.nest.flatten(output_gradients)
            output_gradients = _scaled(factor_of, target, given)
        return own(tape, target, sources, output_gradients, unconnected_gradients)

    return Replaced(tf.GradientTape, gradient=gradient)


def _torch(factor_of: FactorOf) -> Replaced:
    import torch

    own_backward, own_grad = torch.autograd.backward, torch.autograd.grad

    def listed(tensors: Any) -> Any:
        return [tensors] if isinstance(tensors, torch.Tensor) else tensors

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        tensors = listed(tensors)
        own_backward(tensors, _scaled(factor_of, tensors, listed(grad_tensors)), *args, **kwargs)

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        outputs, grad_outputs = listed(outputs), listed(grad_outputs)
        if any(isinstance(each, torch.nn.Parameter) for each in listed(inputs)):
            grad_outputs = _scaled(factor_of, outputs, grad_outputs)
        return own_grad(outputs, inputs, grad_outputs, *args, **kwargs)

    return Replaced(torch.autograd, backward=backward, grad=grad)


def _jax(factor_of: FactorOf) -> Replaced:
    import jax

    from choros.training.jax_forms import LossProgram

    def scaling(own: Callable[..., Any], *, with_value: bool) -> Callable[..., Any]:
        def differentiate(function: Any, argnums: Any = 0, has_aux: bool = False, *args: Any, **kwargs: Any) -> Any:
            differentiated = own(function, argnums, has_aux, *args, **kwargs)
            weights = (argnums,) if isinstance(argnums, int) else tuple(argnums)

            def call(*given: Any, **named: Any) -> Any:
                result = differentiated(*given, **named)
                factor = factor_of(LossProgram(function, given, named, weights))
                if factor is None:
                    return result
                gradients = result[1] if with_value else result[0] if has_aux else result
                scaled = jax.tree.map(lambda each: each * factor.astype(each.dtype), gradients)
                return (result[0], scaled) if with_value else (scaled, result[1]) if has_aux else scaled

            return call

        return differentiate

    return Replaced(
        jax, value_and_grad=scaling(jax.value_and_grad, with_value=True), grad=scaling(jax.grad, with_value=False)
    )
