"""The variables of whole models, including their optimizers' state."""

from __future__ import annotations

import gc
from typing import Any

import keras

from choros.training.distributed_optimizer import reducer_of
from choros.training.keras_internals import layers_of, optimizers_of
from choros.training.variables import broadcast_variables

__all__ = ["broadcast_global_variables", "model_variables"]


def broadcast_global_variables(root_rank: int) -> None:
    """``broadcast_variables`` for all Keras models of this process, including their optimizers' state.

    The name is Horovod's, from TensorFlow's global graph. Models are broadcast in the order of their names, which is
    the same on all ranks that build the same models. Prefer ``broadcast_variables``.

    Args:
        root_rank: a global rank.
    """
    gc.collect()  # Ranks may have released models at different times.
    models = [item for item in gc.get_objects() if issubclass(type(item), keras.Model)]
    inside = {id(layer) for model in models for layer in layers_of(model, include_self=False)}
    for model in sorted((model for model in models if id(model) not in inside), key=lambda model: str(model.name)):
        broadcast_variables(model_variables(model), root_rank)


def model_variables(model: Any, *, seeds: bool = False) -> list[Any]:
    """Returns the weights of a model and the state of its optimizers, unless only one rank keeps that state.

    Args:
        model: a built model.
        seeds: whether to include the seeds of its random layers. Dropout should differ between ranks whose steps see
            different examples, but not where one step sees the examples of all ranks.
    """
    variables = list(model.variables if seeds else model.weights)
    own = getattr(model, "optimizer", None)
    if own is not None and not own.built:
        own.build(model.trainable_variables)
    for optimizer in optimizers_of(model):
        reducer = reducer_of(optimizer)
        if optimizer.built and (reducer is None or reducer.state_owner is None):
            variables += optimizer.variables
    return variables
