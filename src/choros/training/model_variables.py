"""The variables of whole models, with those of their optimizers."""

from __future__ import annotations

import gc
from typing import Any

import keras

from choros.training.distributed_optimizer import reducer_of
from choros.training.keras_internals import layers_of
from choros.training.variables import broadcast_variables

__all__ = ["broadcast_global_variables", "model_variables"]


def broadcast_global_variables(root_rank: int) -> None:
    """``broadcast_variables`` of all Keras models of this process, their optimizers' state included.

    Horovod's name from the time of TensorFlow's global graph. Models are taken in the order of their names,
    which is the same on all ranks that build the same models; prefer ``broadcast_variables``.

    Args:
        root_rank: a global rank.
    """
    gc.collect()  # Ranks may have thrown away models at other times.
    models = [item for item in gc.get_objects() if issubclass(type(item), keras.Model)]
    inside = {id(layer) for model in models for layer in layers_of(model, include_self=False)}
    for model in sorted((model for model in models if id(model) not in inside), key=lambda model: str(model.name)):
        broadcast_variables(model_variables(model), root_rank)


def model_variables(model: Any, *, seeds: bool = False) -> list[Any]:
    """The weights of a model and the state of its optimizer, where all ranks have it.

    Args:
        model: built.
        seeds: with those of its random layers. Dropout should differ between ranks that see different
            examples, but not where one step sees the examples of all.
    """
    variables = list(model.variables if seeds else model.weights)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return variables
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    reducer = reducer_of(optimizer)
    return [*variables, *(optimizer.variables if reducer is None or reducer.state_owner is None else ())]
