"""The ranks' variables made equal."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import keras

from choros.arrays import adapter_of
from choros.comm import ProcessSet, global_process_set
from choros.parallel.ops import broadcast_arrays
from choros.training.combiner import combiner_of

__all__ = ["broadcast_global_variables", "broadcast_variables", "model_variables"]


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites every rank's ``variables`` with those of ``root_rank``.

    Args:
        variables: Keras variables (``model.weights``, ``optimizer.variables``), or variables of a framework
            that have ``assign`` or are torch tensors; the same list on every rank.
        root_rank: a global rank.
        process_set: the ranks that take part.

    Raises:
        MismatchError: ranks have different variables; the text shows the first that differs.

    Example:
        >>> import keras, choros.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> hvd.broadcast_variables(model.weights, root_rank=0)
    """
    if process_set.communicator.size == 1:
        return
    variables = list(variables)
    # Not by their own names: a rank that loaded its model from disk may have others.
    names = [f"variable {index} of {len(variables)}" for index in range(len(variables))]
    hosts = [adapter_of(_value(variable)).to_host(_value(variable)) for variable in variables]
    received = broadcast_arrays(hosts, root_rank, names=names, process_set=process_set)
    for variable, host in zip(variables, received, strict=True):
        if hasattr(variable, "assign"):
            variable.assign(host)
        else:
            value = adapter_of(variable).from_host(host, variable)
            variable.data.copy_(value)


def broadcast_global_variables(root_rank: int) -> None:
    """``broadcast_variables`` of all Keras models of this process, their optimizers' state included.

    Horovod's name from the time of TensorFlow's global graph. Models are taken in the order of their names,
    which is the same on all ranks that build the same models; prefer ``broadcast_variables``.

    Args:
        root_rank: a global rank.
    """
    gc.collect()  # Ranks may have thrown away models at other times.
    models = [item for item in gc.get_objects() if issubclass(type(item), keras.Model)]
    inside = {id(layer) for model in models for layer in model._flatten_layers(include_self=False)}
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
    combiner = combiner_of(optimizer)
    return [*variables, *(optimizer.variables if combiner is None or combiner.shares_state else ())]


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
