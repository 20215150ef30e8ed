"""How a model's training step is told apart from Keras' own: the one module that touches a model.

A choros callback calls ``attach`` before Keras builds the training function. It changes three things of
*this* model object, none of which is saved with it:

1. ``train_step`` tells the distributed optimizer how many examples its batch has;
2. on TensorFlow, XLA is switched off: a compiled function cannot call the host;
3. a ``LossScaleOptimizer`` that ``compile`` put around the distributed optimizer becomes the distributed
   one, so that ranks exchange gradients *before* it asks whether they are finite, and all get one answer.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from choros.keras.optimizer import Synchronizer, synchronizer_of, unwrap, wrap

__all__ = ["attach"]


def attach(model: Any) -> Synchronizer | None:
    """Prepares ``model`` for training with its distributed optimizer.

    Returns:
        The optimizer's synchronizer; ``None`` if it is not a distributed one.
    """
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", None)
    if synchronizer_of(inner) is not None:
        wrap(optimizer, unwrap(inner))
        model.train_function = None
    synchronizer = synchronizer_of(optimizer)
    if synchronizer is None or not synchronizer.reducer.active:
        return synchronizer
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        model.jit_compile = False
    if not hasattr(model.train_step, "__wrapped__"):
        model.train_step = _telling_examples(model, model.train_step)
        model.train_function = None
    return synchronizer


def _telling_examples(model: Any, train_step: Any) -> Any:
    """``train_step`` of ``data``, or of ``(state, data)`` on JAX, that first says how large the batch is."""

    @functools.wraps(train_step)
    def step(*args: Any) -> Any:
        synchronizer = synchronizer_of(model.optimizer)
        if synchronizer is None:
            return train_step(*args)
        with synchronizer.batch_of(_examples(args[-1])):
            return train_step(*args)

    return step


def _examples(data: Any) -> Any:
    """The first dimension of the batch's first array: a number, or a tensor where shapes are not known."""
    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    return keras.ops.shape(first)[0]
